/** Texts that fit their place: measured as the browser draws them, shortened in the middle, or not broken within a value. */
import { html } from "./html.js";

const MOST_KEPT = 20_000;

/** @type {CanvasRenderingContext2D | null} */
let context = null;
let family = "";
/** @type {Map<string, number>} */
const widths = new Map();

/**
 * The width of a text, in pixels.
 * @param {string} text @param {string} font weight and size, such as `700 14px`
 */
export function widthOf(text, font) {
  context ??= document.createElement("canvas").getContext("2d");
  family ||= getComputedStyle(document.body).fontFamily;
  const key = `${font}|${text}`;
  const known = widths.get(key);
  if (known !== undefined) return known;
  if (widths.size >= MOST_KEPT) widths.clear();
  context.font = `${font} ${family}`;
  const { width } = context.measureText(text);
  widths.set(key, width);
  return width;
}

/**
 * The text, or as much of its two ends as has room: both tell names apart.
 * @param {string} text @param {string} font @param {number} width
 */
export function fitted(text, font, width) {
  if (widthOf(text, font) <= width) return text;
  const letters = Array.from(text);
  const cut = (kept) => {
    const tail = Math.floor(kept / 2);
    return `${letters.slice(0, kept - tail).join("")}…${tail ? letters.slice(-tail).join("") : ""}`;
  };
  let [fits, not] = [0, letters.length];
  while (not - fits > 1) {
    const middle = (fits + not) >> 1;
    if (widthOf(cut(middle), font) <= width) fits = middle;
    else not = middle;
  }
  return cut(fits);
}

/** The first of some texts that has room, else the last one, shortened. @param {string[]} texts */
export const firstFitted = (texts, font, width) =>
  fitted(texts.find((each) => widthOf(each, font) <= width) ?? texts.at(-1), font, width);

/** Moments, and numbers with their units. */
const VALUES = /(\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?Z?|\d[\d,.]* (?:d|h|min|s|ms|%)(?![\w-])(?: \d+ (?:h|min|s)(?![\w-]))?)/;

/**
 * A text of which each moment and each number with its unit stays on one line. Not by other spaces: a date breaks at
 * its hyphens, too, and who copies the text has the usual ones.
 * @param {string} text
 */
export const unbroken = (text) => html`<span>${text.split(VALUES).map((part, k) => (k % 2 ? html`<span class="unbroken">${part}</span>` : part))}</span>`;
