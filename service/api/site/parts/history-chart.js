/** A stage's input and output watermark over wall time. Drag to zoom; the buttons do the same. */
import { now, pathOf, read } from "../lib/api.js";
import { html, useLayoutEffect, useMemo, useRef } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { changed, go } from "../lib/route.js";
import { colour, useTheme } from "../lib/theme.js";
import { duration, instant, isInstant } from "../lib/time.js";

const POINTS = 600;
const LIVE_MS = 15_000;
const HEIGHT = 280;
const LEAST_SPAN_MS = 1_000;
const SPANS = [["15 min", 900_000], ["1 h", 3_600_000], ["6 h", 21_600_000], ["1 d", 86_400_000], ["7 d", 604_800_000]];
const DEFAULT_MS = SPANS[1][1];
const LEAST_ROOM_MS = 30_000;
const DAY_MS = 86_400_000;

/** Which part of the history the address asks for. */
function asked(route) {
  const from = Number(route.query.get("from"));
  const to = Number(route.query.get("to"));
  const span = Number(route.query.get("span")) || DEFAULT_MS;
  return to > from && from ? { from, to, live: false } : { from: 0, to: 0, span, live: true };
}

/** @param {{route: any, stage: any, zone: import("../lib/time.js").Zone, nowMs: number}} props */
export function HistoryChart({ route, stage, zone, nowMs }) {
  const view = asked(route);
  const shown = view.live ? { from: nowMs - view.span, to: nowMs } : view;
  const { data, problem } = usePoll((signal) => {
    const until = view.live ? Math.floor(now()) : view.to;
    const from = view.live ? until - view.span : view.from;
    const path = `${pathOf(route.job, route.stage)}/history?from=${from}&to=${until}&points=${POINTS}`;
    return read(path, { signal });
  }, view.live ? LIVE_MS : 0, [route.job, route.stage, view.from, view.to, view.span]);
  const columns = useMemo(() => columnsOf(data?.points ?? [], stage, shown), [data, stage, shown.from, shown.to]);
  const zoomTo = (from, to) => {
    if (to - from >= LEAST_SPAN_MS) go(changed(route, { from: Math.round(from), to: Math.round(to), span: null }));
  };
  return html`<section aria-labelledby="history-title">
    <div class="heading"><h2 id="history-title">Watermarks over time</h2>
      <${Zoom} route=${route} view=${view} shown=${shown} zoomTo=${zoomTo} /></div>
    <p class="legend"><span class="key output"></span> output
      ${stage?.input_watermark !== null && html`<span class="key input"></span> input`}
      <span class="help">drag over the chart to zoom</span></p>
    ${problem && !data && html`<p role="alert" class="alert">${problem.message}</p>`}
    <${Chart} columns=${columns} shown=${shown} zone=${zone} zoomTo=${zoomTo} label=${told(stage, zone)} />
    <${Steps} points=${data?.points ?? []} zone=${zone} />
  </section>`;
}

const told = (stage, zone) => `The output watermark over wall time. It is at ${instant(stage?.output_watermark, zone)}.`;

function Zoom({ route, view, shown, zoomTo }) {
  const width = shown.to - shown.from;
  const middle = (shown.from + shown.to) / 2;
  const by = (factor) => () => zoomTo(middle - (width * factor) / 2, middle + (width * factor) / 2);
  const move = (parts) => () => zoomTo(shown.from + width * parts, shown.to + width * parts);
  const live = (ms) => changed(route, { from: null, to: null, span: ms === DEFAULT_MS ? null : ms });
  return html`<div class="tools" role="group" aria-label="Which time to show">
    ${SPANS.map(([name, ms]) => html`<a class="button" href=${live(ms)}
      aria-current=${view.live && view.span === ms ? "true" : undefined}>${name}</a>`)}
    <button type="button" onClick=${move(-0.5)} aria-label="Earlier">←</button>
    <button type="button" onClick=${by(0.5)} aria-label="Zoom in">+</button>
    <button type="button" onClick=${by(2)} aria-label="Zoom out">−</button>
    <button type="button" onClick=${move(0.5)} aria-label="Later">→</button>
  </div>`;
}

/** What uPlot draws: wall times, outputs, inputs. The stage as it is now comes last. */
function columnsOf(points, stage, shown) {
  const rows = points.map((each) => [each.at, each.output_watermark, each.input_watermark]);
  const last = rows.at(-1);
  if (stage) {
    const at = Date.parse(stage.updated_at);
    const current = [stage.output_watermark, stage.input_watermark];
    if (last && at > last[0] && at <= shown.to) rows.push([at, ...current]);
  }
  const end = rows.at(-1);
  if (end && end[0] < shown.to) rows.push([shown.to, end[1], end[2]]);
  const value = (ms) => (isInstant(ms) ? ms : null);
  return [rows.map((row) => row[0]), rows.map((row) => value(row[1])), rows.map((row) => value(row[2]))];
}

function Chart({ columns, shown, zone, zoomTo, label }) {
  const box = useRef(null);
  const chart = useRef(null);
  const zoom = useRef(zoomTo);
  const readout = useRef(null);
  zoom.current = zoomTo;
  const theme = useTheme();
  // Before the browser draws: later, the view may have gone already.
  useLayoutEffect(() => {
    const element = box.current;
    const options = optionsOf(zone, element.clientWidth, {
      zoom: (from, to) => zoom.current(from, to),
      tell: (text) => (readout.current.textContent = text),
    });
    const made = new globalThis.uPlot(options, columns, element);
    chart.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [zone, theme]);
  useLayoutEffect(() => {
    chart.current.batch(() => {
      chart.current.setData(columns, false);
      chart.current.setScale("x", { min: shown.from, max: shown.to });
    });
  }, [columns, shown.from, shown.to, zone, theme]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${box}></div>
    <p class="readout" ref=${readout} aria-hidden="true"></p>`;
}

function optionsOf(zone, width, { zoom, tell }) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const stepped = globalThis.uPlot.paths.stepped({ align: 1 });
  const series = (label, stroke, dash) => ({ label, stroke, width: 2, dash, paths: stepped, points: { show: false } });
  const ticks = (_, splits, __, ___, step) => splits.map((ms, k) => tick(ms, splits[k - 1], step, zone));
  return {
    width,
    height: HEIGHT,
    ms: 1,
    legend: { show: false },
    tzDate: (ms) => (zone === "utc" ? globalThis.uPlot.tzDate(new Date(ms), "Etc/UTC") : new Date(ms)),
    cursor: { drag: { x: true, y: false, setScale: false }, y: false },
    scales: { x: { time: true, auto: false }, y: { time: true, range: padded } },
    axes: [{ ...axis, values: ticks, space: 110 }, { ...axis, values: ticks, size: 96 }],
    series: [{}, series("output", colour("--output")), series("input", colour("--input"), [6, 4])],
    hooks: {
      setSelect: [(made) => {
        const { left, width: wide } = made.select;
        if (wide < 4) return;
        zoom(made.posToVal(left, "x"), made.posToVal(left + wide, "x"));
        made.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      setCursor: [(made) => {
        const { idx } = made.cursor;
        const [at, output, input] = made.data.map((column) => column[idx ?? 0]);
        tell(idx === null || at === undefined ? ""
          : `at ${instant(at, zone)}: output ${instant(output, zone)}${input === null ? "" : `, input ${instant(input, zone)}`}`);
      }],
    },
  };
}

/** A stage that stands still has no range of its own: then some time around it is shown. */
function padded(_, low, high) {
  if (low === null) return [now() - DEFAULT_MS, now()];
  const room = Math.max((high - low) * 0.05, LEAST_ROOM_MS);
  return [low - room, high + room];
}

/** The time, and the date where it is another than before. */
function tick(ms, before, step, zone) {
  const [date, time] = instant(ms, zone).replace("Z", "").split(" ");
  if (step >= DAY_MS) return date;
  const clock = step >= 60_000 ? time.slice(0, 5) : time;
  const known = before !== undefined && instant(before, zone).startsWith(date);
  return known ? clock : `${date}\n${clock}`;
}

/** The same in lines, for who does not see the chart. */
function Steps({ points, zone }) {
  const last = points.slice(-50).reverse();
  return html`<details><summary>The last ${last.length} steps as a table</summary><div class="scroll"><table>
    <thead><tr><th scope="col">At</th><th scope="col">Output watermark</th><th scope="col">Input watermark</th>
      <th scope="col">After</th></tr></thead>
    <tbody>${last.map((each, k) => html`<tr key=${each.at}><td class="time">${instant(each.at, zone)}</td>
      <td class="time">${instant(each.output_watermark, zone)}</td><td class="time">${each.input_watermark === null ? "–" : instant(each.input_watermark, zone)}</td>
      <td>${k + 1 < last.length ? duration(each.at - last[k + 1].at) : "–"}</td></tr>`)}</tbody></table></div></details>`;
}
