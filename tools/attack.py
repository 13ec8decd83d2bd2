#!/usr/bin/env python3
"""Attacks the program as an unfriendly user would: kills, full disks, damaged files, absurd values, strangers on its
ports. Prints a line for each case that fails and a table at the end; exit code 0 only where all passed.

  tools/attack.py [--short] [--binary build/tessera] [--only PATTERN] [--jobs N] [--seed N] [--list]

It works in a temporary folder, uses no network but the loopback, and ends what it started. Needs Python 3.11. What the
machine cannot do (no mpirun, no mounts, no other user) is skipped and said.
"""
import argparse
import fnmatch
import os
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from attack import command_line, configuration, checkpoint_damage, data_damage, folders, hostile_models  # noqa: E402
from attack import kills, layouts, limits, nonfinite, peers, rank_kills, ranks, rendezvous, signals  # noqa: E402
from attack.runner import Attack  # noqa: E402

FAMILIES = [kills, rank_kills, peers, limits, signals, checkpoint_damage, data_damage, hostile_models, command_line,
            configuration, ranks, rendezvous, folders, nonfinite, layouts]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/tessera")
    parser.add_argument("--short", action="store_true", help="a part of each family, in a few minutes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose FAMILY/NAME holds or matches this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--seed", type=int, default=1, help="of the random draws")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases that fail")
    parser.add_argument("--minutes", type=float, help="limit of the whole; default: 13 with --short, otherwise 90")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    return parser.parse_args(arguments)


def chosen(case, options):
    matches = options.only in case.title or fnmatch.fnmatch(case.title, options.only)
    return matches and (case.short or not options.short)


def main():
    options = parse(sys.argv[1:])
    if not os.access(options.binary, os.X_OK):
        sys.exit(f"attack.py: {options.binary} is not a program; build it first, or name it by --binary")
    attack = Attack(os.path.abspath(options.binary), options.seed, options.keep)
    with attack:
        cases = [case for family in FAMILIES for case in family.cases(attack) if chosen(case, options)]
        if options.list:
            print("\n".join(case.title for case in cases))
            return 0
        minutes = options.minutes or (13 if options.short else 90)
        return attack.run_all(cases, options.jobs, 60 * minutes)


if __name__ == "__main__":
    sys.exit(main())
