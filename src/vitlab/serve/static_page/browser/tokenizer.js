// Sentences as a CLIP reads them: byte pairs, as the `tokenizers` library finds them for vitlab/text/tokenizer.py.
// about: { vocab: {token: number}, merges: [[left, right]], context, start, end, padding }
const WORDS = /<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+/gu;
const WORD_END = "</w>";

// The 256 bytes as printable characters
const LETTERS = (() => {
  const readable = [[33, 126], [161, 172], [174, 255]].flatMap(([from, to]) => Array.from({ length: to - from + 1 }, (_, i) => from + i));
  const letters = new Array(256);
  readable.forEach((byte) => { letters[byte] = String.fromCodePoint(byte); });
  let next = 256;
  for (let byte = 0; byte < 256; byte++) letters[byte] ??= String.fromCodePoint(next++);
  return letters;
})();

export function tokenIds(about, text) {
  const ranks = new Map(about.merges.map(([left, right], rank) => [`${left} ${right}`, rank]));
  const words = text.normalize("NFC").replace(/\s+/gu, " ").toLowerCase().match(WORDS) ?? [];
  const special = { "<|startoftext|>": about.start, "<|endoftext|>": about.end };
  const ids = words.flatMap((word) => special[word] ?? parts(word, ranks).map((part) => about.vocab[part] ?? about.end));
  const kept = [about.start, ...ids.slice(0, about.context - 2), about.end];
  return [...kept, ...new Array(about.context - kept.length).fill(about.padding)];
}

// The word's letters, merged pair by pair, the pair that was learned first before the others
function parts(word, ranks) {
  const letters = Array.from(new TextEncoder().encode(word), (byte) => LETTERS[byte]);
  letters[letters.length - 1] += WORD_END;
  for (;;) {
    let best = -1, rank = Infinity;
    for (let i = 0; i + 1 < letters.length; i++) {
      const found = ranks.get(`${letters[i]} ${letters[i + 1]}`);
      if (found !== undefined && found < rank) [best, rank] = [i, found];
    }
    if (best < 0) return letters;
    letters.splice(best, 2, letters[best] + letters[best + 1]);
  }
}
