// Numbers and places as the stories write them. A fact is a text or a number, or { en, zh } where the two languages differ.

// "{name} sees {n} patches": every {…} is replaced by that fact. A missing fact is a mistake in the story.
export function fill(text, facts, language) {
  const filled = text.replace(/\{(\w+)\}/g, (_, name) => {
    const fact = facts[name];
    if (fact === undefined || Number.isNaN(fact)) throw new Error(`no fact "${name}" for: ${text}`);
    return typeof fact === "object" ? fill(fact[language], facts, language) : String(fact);
  });
  return filled.replace(/(\d) %/g, "$1\u00a0%"); // a line does not begin with %
}

export const decimal = (value, digits = 2) => value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−"); // no −0.00
export const whole = (value) => Math.round(value).toLocaleString("en");

export function place(patch, [, columns]) {
  const row = Math.floor(patch / columns) + 1, column = (patch % columns) + 1;
  return { en: `row ${row}, column ${column}`, zh: `第 ${row} 行第 ${column} 列` };
}

const DIRECTIONS = {
  "-1,0": { en: "directly above", zh: "正上方" }, "1,0": { en: "directly below", zh: "正下方" },
  "0,-1": { en: "directly to the left", zh: "左边紧邻" }, "0,1": { en: "directly to the right", zh: "右边紧邻" },
  "-1,-1": { en: "above to the left", zh: "左上方" }, "-1,1": { en: "above to the right", zh: "右上方" },
  "1,-1": { en: "below to the left", zh: "左下方" }, "1,1": { en: "below to the right", zh: "右下方" },
};
export const direction = (offset) => DIRECTIONS[offset.join()];

const SECONDS_PER = { en: 60 / 200, zh: 60 / 300 }; // a word, a character: a calm reader
export function readingSeconds(text, language) {
  const units = language === "zh" ? text.match(/[\u4e00-\u9fff]|[A-Za-z0-9.%]+/g) : text.match(/[^\s]+/g);
  return SECONDS_PER[language] * (units || []).length;
}
