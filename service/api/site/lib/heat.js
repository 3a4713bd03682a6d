/**
 * The colours of a map of ranges. A lag has shades of one calm colour: a sound stage waits for its slowest range, which
 * is not trouble. The colours of an alarm are for ranges in trouble alone.
 */
import { isEnd } from "./time.js";

/** A lag of up to twice the median is usual, and so is each up to this one. */
const LEAST_USUAL_MS = 60_000;
const USUAL_MEDIANS = 2;
/** With each doubling of the usual lag, the shade is a stronger one. */
const STRONGEST = 4;

/** @typedef {{lowest: number | null, highest: number | null, ranges: number, never_reported: number, expired: number, idle: number, final: number, retired: number}} Bucket */
/** @typedef {{high: number, usual: number}} Scale the furthest range of the map, and the usual lag behind it */

/** A range that has promised, and is not at the end of time. @param {Bucket} bucket */
export const isWaitedFor = (bucket) => bucket.lowest !== null && !isEnd(bucket.lowest);

/** @param {Bucket[]} buckets @returns {Scale} */
export function scaleOf(buckets) {
  const there = buckets.filter(isWaitedFor);
  const high = there.reduce((most, each) => Math.max(most, each.highest ?? each.lowest), -Infinity);
  const lags = there.map((each) => high - each.lowest).sort((a, b) => a - b);
  const median = lags[(lags.length - 1) >> 1] ?? 0;
  return { high, usual: Math.max(LEAST_USUAL_MS, USUAL_MEDIANS * median) };
}

/** The lag from which on a cell has the strongest shade. @param {Scale} scale */
export const strongest = (scale) => scale.usual * 2 ** (STRONGEST - 1);

/** @param {number} lag @param {Scale} scale */
function levelOf(lag, { usual }) {
  if (lag <= usual) return 0;
  return Math.min(STRONGEST, 1 + Math.floor(Math.log2(lag / usual)));
}

/**
 * The classes of a cell: its shade, and its trouble.
 * @param {Bucket} bucket @param {Scale} scale @param {boolean} ended the run of the stage has finished: it needs no worker
 */
export function heatOf(bucket, scale, ended) {
  const marks = bucket.expired && !ended ? " expired" : "";
  if (bucket.never_reported) return `never${marks}`;
  if (isWaitedFor(bucket)) return `level${levelOf(scale.high - bucket.lowest, scale)}${marks}`;
  return bucket.idle ? `idle${marks}` : `final${marks}`;
}

/** Slow ranges are the trouble of a stage alone that is stalled: then their shades are those of an alarm. */
export const isAlarm = (health) => health === "stalled";
