/** Plots over wall time: drawn with uPlot, in the colours of the theme and the zone of the page. */
import { useLayoutEffect, useRef } from "./html.js";
import { colour, useTheme } from "./theme.js";
import { instant } from "./time.js";

const DAY_MS = 86_400_000;
/** The same for all plots, so that a moment is at the same place in each. */
const LEFT = 96;

/**
 * Draw columns in an element, again whenever they change.
 * @param {{columns: any[], shown: {from: number, to: number}, zone: import("./time.js").Zone, height: number,
 *   options: () => object, on?: unknown[]}} plot `options`: those that differ from plot to plot; `on`: redraws
 * @returns {import("./html.js").Ref} the element
 */
export function usePlot({ columns, shown, zone, height, options, on = [] }) {
  const box = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  // Before the browser draws: later, the view may have gone already.
  useLayoutEffect(() => {
    const element = box.current;
    const made = new globalThis.uPlot({ ...shared(zone, height, element.clientWidth), ...options() }, columns, element);
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [zone, theme]);
  useLayoutEffect(() => {
    plot.current.batch(() => {
      plot.current.setData(columns, false);
      plot.current.setScale("x", { min: shown.from, max: shown.to });
    });
  }, [columns, shown.from, shown.to, zone, theme]);
  useLayoutEffect(() => plot.current.redraw(false), on);
  return box;
}

const shared = (zone, height, width) => ({
  width,
  height,
  ms: 1,
  legend: { show: false },
  tzDate: (ms) => (zone === "utc" ? globalThis.uPlot.tzDate(new Date(ms), "Etc/UTC") : new Date(ms)),
});

/** A label to the left may have a second line, which ends below the plot: the times stand lower. */
const BELOW = { space: 110, gap: 18, size: 64 };

/** The axes: wall time below, and to the left the values, each written by a function. */
export function axes(below, left, ofBelow = {}, ofLeft = {}) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  return [{ ...axis, values: below, ...BELOW, ...ofBelow }, { ...axis, values: left, size: LEFT, ...ofLeft }];
}

/** What an axis of times is labelled with. */
export const times = (zone) => (_, splits, __, ___, step) => splits.map((ms, k) => tick(ms, splits[k - 1], step, zone));

/** A line of steps. `align`: 1 if a value holds from its moment on, -1 if up to it. */
export const steps = (label, stroke, { dash, align = 1 } = {}) => ({
  label, stroke: colour(stroke), width: 2, dash, paths: globalThis.uPlot.paths.stepped({ align }), points: { show: false },
});

/** The time, and the date where it is another than before. */
function tick(ms, before, step, zone) {
  const [date, time] = instant(ms, zone).replace("Z", "").split(" ");
  if (step >= DAY_MS) return date;
  const clock = step >= 60_000 ? time.slice(0, 5) : time;
  const known = before !== undefined && instant(before, zone).startsWith(date);
  return known ? clock : `${date}\n${clock}`;
}
