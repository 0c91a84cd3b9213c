// Where the page gets its numbers: all modules import this one name. A page without a server brings another source.js,
// whose `source` has the same functions as served.js.
export { source } from "./served.js";
