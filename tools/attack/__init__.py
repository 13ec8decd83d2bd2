"""Attacks on the program, one module a family; tools/attack.py runs them."""
