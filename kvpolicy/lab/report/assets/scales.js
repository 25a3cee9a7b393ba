// Scales from values to positions, and their ticks.

/** A scale from [low, high] to pixels [from, to]; `log`: equal ratios are equally far apart. */
export function scale(low, high, from, to, log = false) {
  const turn = log ? Math.log2 : (value) => value;
  const span = turn(high) - turn(low) || 1;
  return (value) => from + ((turn(value) - turn(low)) / span) * (to - from);
}

/** Round values between 0 and `high`, about `count` of them; `binary`: steps that suit bytes. */
export function ticks(high, count = 6, binary = false) {
  const base = binary ? 2 : 10;
  const unit = base ** Math.floor(Math.log(high / count) / Math.log(base));
  const step = unit * ((binary ? [1, 2] : [1, 2, 5, 10]).find((f) => unit * f >= high / count) || base);
  const found = [];
  for (let i = 0; i * step <= high * 1.0001; i += 1) found.push(i * step);
  return found;
}

/** Where an axis of budgets or bytes begins and ends, and whether it is one of ratios, as in the plots. */
export function sizeAxis(sizes) {
  const [low, high] = sizes.length ? [Math.min(...sizes), Math.max(...sizes)] : [0, 1];
  if (low > 0 && high > 6 * low) return { low: low / 1.12, high: high * 1.12, log: true };
  const margin = 0.06 * (high - low) || 0.5;
  return { low: low - margin, high: high + margin, log: false };
}

/** Where an axis of positive values begins and ends so that all are well inside. */
export function valueAxis(values) {
  const positive = values.filter((value) => value > 0);
  const [low, high] = positive.length ? [Math.min(...positive), Math.max(...positive)] : [1, 2];
  if (high > 6 * low) return { low: low / 1.35, high: high * 1.35, log: true };
  return { low: 0, high: 1.1 * high, log: false };
}

/** Ticks of an axis of ratios: powers of two, as many as fit. */
export function logTicks(low, high, count = 6) {
  const first = Math.ceil(Math.log2(low));
  const last = Math.floor(Math.log2(high));
  const step = Math.max(1, Math.ceil((last - first + 1) / count));
  const found = [];
  for (let power = first; power <= last; power += step) found.push(2 ** power);
  return found;
}

/** Labels that fit: of those too close to the one before, none. */
export function sparse(places, gap) {
  let last = -Infinity;
  return places.map((place) => {
    if (place - last < gap) return false;
    last = place;
    return true;
  });
}
