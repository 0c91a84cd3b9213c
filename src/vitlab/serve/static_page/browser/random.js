// The random numbers of the library, bit for bit: those of vitlab/images/randomness.py, and torch's permutations.
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

// torch.randperm(n, generator=torch.Generator().manual_seed(seed)): 0 .. n-1, shuffled
export function torchPermutation(n, seed) {
  const order = Array.from({ length: n }, (_, i) => i), next = mersenneTwister(seed);
  for (let i = 0; i < n - 1; i++) {
    const other = i + (next() % (n - i));
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order;
}

// MT19937, 32 bits a time
function mersenneTwister(seed) {
  const state = new Uint32Array(624);
  state[0] = Number(BigInt.asUintN(32, BigInt(seed)));
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  let at = 624;
  return () => {
    if (at === 624) {
      for (let i = 0; i < 624; i++) {
        const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
        state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
      at = 0;
    }
    let y = state[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  };
}
