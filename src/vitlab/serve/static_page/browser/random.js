// Random numbers that are a function of their coordinates, bit for bit those of vitlab/images/randomness.py.
const MASK = (1n << 64n) - 1n, GOLDEN = 0x9e3779b97f4a7c15n;

function mix(x) { // the finaliser of SplitMix64
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

function hash(...coordinates) {
  return coordinates.reduce((state, value) => mix((state * 3n + GOLDEN + mix((BigInt.asUintN(64, BigInt(value)) + GOLDEN) & MASK)) & MASK), 0n);
}

// `count` numbers in [0, 1)
export function uniform(count, ...coordinates) {
  const sample = hash(...coordinates);
  return Float64Array.from({ length: count }, (_, i) => Number(hash(sample, i) >> 11n) * 2 ** -53);
}

// 0 .. n-1 in an order that the coordinates alone decide
export function permutation(n, ...coordinates) {
  const keys = Array.from({ length: n }, (_, i) => uniform(1, ...coordinates, i)[0]);
  return keys.map((_, i) => i).sort((a, b) => keys[a] - keys[b] || a - b);
}
