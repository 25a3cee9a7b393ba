// Formatting of numbers.

const NONE = "\u2013";

/** A number with four significant digits and thin groups of thousands. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value.toLocaleString("en-US", digits);
}

export function share(value) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(0)}%`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (let left = Math.abs(value); left >= 1000 && power < units.length - 1; left /= 1024) power += 1;
  const scaled = value / 1024 ** power;
  return `${scaled.toLocaleString("en-US", { maximumSignificantDigits: power ? 3 : 4 })} ${units[power]}`;
}

const FORMATS = { share, bytes, tokens: tokens, rate: tokens, number };

function tokens(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 100 ? Math.round(value).toLocaleString("en-US") : number(value);
}

/** A value of a quantity, such as {kind: "share"}, as text. */
export const format = (quantity, value) => (FORMATS[quantity.kind] || number)(value);

/** An estimate [value, low, high] as text; low and high are null where unknown. */
export function estimate(quantity, found) {
  if (!found) return NONE;
  const value = format(quantity, found[0]);
  return found[1] === null ? value : `${value} [${interval(quantity, found)}]`;
}

/** The interval of an estimate as text. */
export function interval(quantity, found) {
  if (!found || found[1] === null) return NONE;
  return `${format(quantity, found[1])} \u2013 ${format(quantity, found[2])}`;
}

export const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
