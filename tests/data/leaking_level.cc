// What an object for a CPU level must not have: a function that the linker may take for all
// callers.
template <typename T>
[[gnu::noinline]] T twice(T value) {
  return value + value;
}

int twice_avx512(int value) {
  return twice(value);
}
