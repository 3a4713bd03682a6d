/** Rows and late rows a second, over the wall time of the chart above. */
import { html, useMemo, useRef } from "../lib/html.js";
import { axes, steps, usePlot } from "../lib/plot.js";
import { instant } from "../lib/time.js";

const HEIGHT = 84;
const PARTS = 200;
const LEAST_MS = 1_000;
/** The counts now are some seconds old: over a shorter time, their rate would be wrong. */
const LEAST_NOW_MS = 10_000;

/** @param {number | null} value */
export const perSecond = (value) => (value === null ? "–" : value >= 100
  ? Math.round(value).toLocaleString("en") : value.toLocaleString("en", { maximumSignificantDigits: 3 }));

/** Rows or late rows a second between two counts. Null: the counts have started over. */
export const rate = (before, after, name) => (after[name] < before[name] ? null
  : ((after[name] - before[name]) * 1_000) / (after.at - before.at));

const isCounted = (point) => typeof point.records === "number" && typeof point.late === "number";

/**
 * Wall times, rows a second, late rows a second: each up to its time. Null where it is not known.
 * @param {any[]} points of the history @param {{from: number, to: number}} shown
 * @param {any} [stage] the stage as it is now, unless the past is shown
 * @returns {[number[], (number | null)[], (number | null)[]]}
 */
export function ratesOf(points, shown, stage) {
  const least = Math.max(LEAST_MS, (shown.to - shown.from) / PARTS);
  const known = points.filter(isCounted);
  const rows = [];
  let before = null;
  const add = (point) => {
    rows.push([point.at, before && rate(before, point, "records"), before && rate(before, point, "late")]);
    before = point;
  };
  for (const point of known) if (!before || point.at - before.at >= least) add(point);
  const current = stage && { at: shown.to, records: stage.records, late: stage.late };
  if (before && current && isCounted(current) && current.at - before.at >= Math.max(least, LEAST_NOW_MS)) add(current);
  return [0, 1, 2].map((k) => rows.map((row) => row[k]));
}

/** @param {{points: any[], shown: {from: number, to: number}, stage: any, zone: any, isLive: boolean}} props */
export function Rates({ points, shown, stage, zone, isLive }) {
  const current = isLive ? stage : null;
  const [at, rows, late] = useMemo(() => ratesOf(points, shown, current), [points, current, shown.from, shown.to]);
  const some = (values) => values.some((value) => value > 0);
  if (!some(rows) && !some(late)) return null;
  return html`<div class="rates">
    <${Strip} name="rows" stroke="--output" at=${at} values=${rows} shown=${shown} zone=${zone} />
    ${some(late) && html`<${Strip} name="late rows" stroke="--bad" at=${at} values=${late} shown=${shown} zone=${zone} />`}</div>`;
}

function Strip({ name, stroke, at, values, shown, zone }) {
  const readout = useRef(null);
  const columns = useMemo(() => [at, values], [at, values]);
  const box = usePlot({ columns, shown, zone, height: HEIGHT, options: () => ({
    cursor: { drag: { x: false, y: false }, y: false },
    scales: { x: { time: true, auto: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    // The times are those of the chart above.
    axes: axes(() => [], (_, splits) => splits.map(perSecond), { size: 8 }, { space: 24 }),
    series: [{}, steps(name, stroke, { align: -1 })],
    hooks: { setCursor: [(made) => {
      const { idx } = made.cursor;
      const known = idx !== null && made.data[0][idx] !== undefined;
      readout.current.textContent = known ? `up to ${instant(made.data[0][idx], zone)}: ${perSecond(made.data[1][idx])} ${name} a second` : "";
    }] },
  }) });
  const last = values.findLast((value) => value !== null);
  return html`<p class="legend">${name} a second</p>
    <div class="strip" role="img" aria-label=${`${name} a second over wall time, at last ${perSecond(last ?? null)}`} ref=${box}></div>
    <p class="readout" ref=${readout} aria-hidden="true"></p>`;
}
