// Numbers for people.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => grouped.format(value);

/** Rates: one digit after the point while they are small. */
export function rate(value) {
  return value === 0 || value >= 99.95 ? grouped.format(value) : value.toFixed(1);
}

export function percent(share) {
  return `${(share * 100).toFixed(share === 0 || share >= 0.0995 ? 0 : 1)} %`;
}

export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${value.toFixed(place && value < 100 ? 1 : 0)} ${units[place]}`;
}

/** "1 token", "2 tokens". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
