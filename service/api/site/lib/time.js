/** Instants and durations, for people. An instant is in ms since 1970, UTC. */

import { now } from "./api.js";

/** What the API has for the end of time; as JavaScript reads it, it is 2^63. */
const END = 2 ** 62;

/** @typedef {"utc" | "local"} Zone */

/** Beyond this, `Date` has no text. */
const LAST_DATE = 8.64e15;

/** @param {number | null | undefined} ms */
export const isEnd = (ms) => typeof ms === "number" && ms >= END;

/** @param {number | null | undefined} ms */
export const isInstant = (ms) => typeof ms === "number" && Math.abs(ms) <= LAST_DATE;

const two = (number) => String(number).padStart(2, "0");

/**
 * An instant as text: `2026-01-05 14:03:22`, with `Z` if it is UTC.
 * @param {number | null | undefined} ms
 * @param {Zone} zone
 */
export function instant(ms, zone) {
  if (ms === null || ms === undefined) return "no watermark yet";
  if (isEnd(ms)) return "the end of time";
  const at = new Date(ms);
  if (zone === "utc") return `${at.toISOString().slice(0, 19).replace("T", " ")}Z`;
  return `${day(at)} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

function day(at) {
  return `${String(at.getFullYear()).padStart(4, "0")}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

/** The zone's name: `UTC`, or where this browser is. */
export function zoneName(zone) {
  return zone === "utc" ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone;
}

const UNITS = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["min", 60_000],
  ["s", 1_000],
];
const FEW_MS = 10_000;

/**
 * A duration as text, in its two largest units, without those of zero: `3 min 20 s`, `7.2 s`, `250 ms`. It is cut,
 * and not rounded, by the rule that the service and the commands have.
 * @param {number | null | undefined} ms
 */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 0) return `−${duration(-ms)}`;
  const whole = Math.floor(ms);
  if (whole < 1_000) return whole ? `${whole} ms` : "0 s";
  if (whole < FEW_MS) return `${Math.floor(whole / 100) / 10} s`;
  const first = UNITS.findIndex(([, size]) => whole >= size);
  const [unit, size] = UNITS[first];
  const next = UNITS[first + 1];
  const large = `${Math.floor(whole / size).toLocaleString("en")} ${unit}`;
  const rest = next ? Math.floor((whole % size) / next[1]) : 0;
  return rest ? `${large} ${rest} ${next[0]}` : large;
}

/** A duration as text with its largest unit alone, and what follows its units. @param {string} text */
export const coarse = (text) => text.replace(/^(\S+ \S+) \d+ (?:d|h|min|s)\b/, "$1");

/** How far an event time is behind the clock, or ahead of it, as text. The end of time is neither. */
export function lagText(ms, nowMs) {
  if (ms === null || ms === undefined || isEnd(ms)) return "–";
  const behind = nowMs - ms;
  return behind <= -AHEAD_MS ? `${duration(-behind)} ahead` : duration(Math.max(0, behind));
}

/** Clocks of machines differ by less. */
const AHEAD_MS = 1_000;

/** Moments in the texts of the API, which are in UTC: whole, or without their seconds, or without their day. */
const WHOLE = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/g;
const SHORT = /\b(since|at) (\d{4}-\d\d-\d\d )?(\d\d:\d\d)Z/g;

/**
 * A moment to the minute, with its day where that is not today: `14:03Z`.
 * @param {number} ms @param {Zone} zone @param {number} [nowMs] what *today* is
 */
export function minute(ms, zone, nowMs = now()) {
  const [day, time] = instant(ms, zone).split(" ");
  const isToday = day === instant(nowMs, zone).slice(0, 10);
  return `${isToday ? "" : `${day} `}${time.slice(0, 5)}${zone === "utc" ? "Z" : ""}`;
}

/**
 * A text of a person with its whole moments in the zone of the page. A short one may be of any zone.
 * @param {string} text @param {Zone} zone
 */
export const wholeMoments = (text, zone) => text.replace(WHOLE, (iso) => instant(Date.parse(iso), zone));

/**
 * A text of the API with its moments in the zone of the page.
 * @param {string} text @param {Zone} zone @param {number} [nowMs] what *today* is
 */
export function moments(text, zone, nowMs = now()) {
  return wholeMoments(text, zone).replace(SHORT, (found, word, date, clock) => {
    const ms = Date.parse(`${(date ?? instant(nowMs, "utc").slice(0, 10)).trim()}T${clock}:00Z`);
    return Number.isNaN(ms) ? found : `${word} ${minute(ms, zone, nowMs)}`;
  });
}

/** @param {string | null | undefined} iso @returns {number | null} */
export const fromIso = (iso) => (iso ? Date.parse(iso) : null);

/** What `<input type="datetime-local">` takes. */
export function toInput(ms, zone) {
  if (!isInstant(ms)) return "";
  return instant(ms, zone).replace("Z", "").replace(" ", "T");
}

/** @param {string} text of such an input @param {Zone} zone @returns {number | null} */
export function fromInput(text, zone) {
  const ms = Date.parse(zone === "utc" ? `${text}Z` : text);
  return Number.isNaN(ms) ? null : ms;
}

/** @param {number} count @param {string} one @param {string} [many] */
export const counted = (count, one, many = `${one}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
