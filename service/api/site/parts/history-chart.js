/** A stage's watermarks and rates over wall time, with its changes. Drag to zoom; the buttons do the same. */
import { now, pathOf, read } from "../lib/api.js";
import { html, useMemo, useRef, useState } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { steps as stepsOf } from "../lib/job-store.js";
import { axes, steps, times, usePlot } from "../lib/plot.js";
import { changed, go } from "../lib/route.js";
import { duration, instant, isEnd, isInstant } from "../lib/time.js";
import { marksOf, MarksLegend, MarksTable, place, wordsAt } from "./marks.js";
import { perSecond, rate, Rates } from "./rates.js";
import { signOf, wordOf } from "./status.js";

const POINTS = 600;
const CHANGES = 200;
const LIVE_MS = 15_000;
const HEIGHT = 294;
const LEAST_SPAN_MS = 1_000;
const SPANS = [["15 min", 900_000], ["1 h", 3_600_000], ["6 h", 21_600_000], ["1 d", 86_400_000], ["7 d", 604_800_000]];
const DEFAULT_MS = SPANS[1][1];
const LEAST_ROOM_MS = 30_000;

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
  const whole = view.live ? { from: nowMs - view.span, to: nowMs } : view;
  const { data, problem } = usePoll((signal) => {
    const until = view.live ? Math.floor(now()) : view.to;
    const from = view.live ? until - view.span : view.from;
    const path = `${pathOf(route.job, route.stage)}/history?from=${from}&to=${until}&points=${POINTS}`;
    const changes = `${pathOf(route.job)}/changes?stage=${encodeURIComponent(route.stage)}&from=${from}&to=${until}&limit=${CHANGES}`;
    return Promise.all([read(path, { signal }), read(changes, { signal })]);
  }, view.live ? LIVE_MS : 0, [route.job, route.stage, view.from, view.to, view.span, ...stepsOf(stage)]);
  const points = data?.[0].points ?? NONE;
  const marks = useMemo(() => marksOf(data?.[1].changes ?? NONE), [data]);
  const shown = sinceBegin(whole, marks, view.live && !route.query.has("span"));
  const [left, setLeft] = useState(0);
  const more = data?.[1].next !== undefined;
  const columns = useMemo(() => columnsOf(points, stage, shown), [points, stage, shown.from, shown.to]);
  const zoomTo = (from, to) => {
    if (to - from >= LEAST_SPAN_MS) go(changed(route, { from: Math.round(from), to: Math.round(to), span: null }));
  };
  return html`<section aria-labelledby="history-title">
    <div class="heading"><h2 id="history-title">Watermarks over time</h2>
      <${Zoom} route=${route} view=${view} shown=${shown} whole=${shown === whole} zoomTo=${zoomTo} /></div>
    <p class="legend"><span class="key output"></span> output
      ${stage?.input_watermark !== null && html`<span class="key input"></span> input`}
      <span class="help">drag over the chart to zoom</span></p>
    ${problem && !data && html`<p role="alert" class="alert">${problem.message}</p>`}
    <${Chart} columns=${columns} marks=${marks} setLeft=${setLeft} shown=${shown} zone=${zone} zoomTo=${zoomTo} label=${told(stage, zone)} />
    ${data && !hasValues(columns) && html`<p class="empty">${emptyText(points, stage)}</p>`}
    <${MarksLegend} marks=${marks} left=${left} more=${more} />
    <${Rates} points=${points} shown=${shown} stage=${stage} zone=${zone} isLive=${view.live} />
    ${data ? html`<${Steps} points=${points} zone=${zone} />` : !problem && html`<p class="empty">Loading…</p>`}
    <${MarksTable} marks=${marks} more=${more} zone=${zone} />
  </section>`;
}

const NONE = [];

/** A young job from its begin on, unless a span is asked for: most of an hour would be empty. */
function sinceBegin(whole, marks, may) {
  const begin = marks.find((each) => each.kind === "created" || each.kind === "reset")?.at ?? 0;
  return may && begin > whole.from ? { from: begin - Math.max(5_000, (whole.to - begin) / 20), to: whole.to } : whole;
}

const told = (stage, zone) => `The output watermark over wall time. It is at ${instant(stage?.output_watermark, zone)}.`;

function Zoom({ route, view, shown, whole, zoomTo }) {
  const width = shown.to - shown.from;
  const middle = (shown.from + shown.to) / 2;
  const by = (factor) => () => zoomTo(middle - (width * factor) / 2, middle + (width * factor) / 2);
  const move = (parts) => () => zoomTo(shown.from + width * parts, shown.to + width * parts);
  const live = (ms) => changed(route, { from: null, to: null, span: ms });
  return html`<div class="tools" role="group" aria-label="Which time to show">
    ${SPANS.map(([name, ms]) => html`<a class="button" href=${live(ms)}
      aria-current=${view.live && whole && view.span === ms ? "true" : undefined}>${name}</a>`)}
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
  const drawn = untilTheEnd(rows);
  return [drawn.map((row) => row[0]), drawn.map((row) => value(row[1])), drawn.map((row) => value(row[2]))];
}

/** A watermark holds up to the moment at which it reaches the end of time, where its line ends. */
const untilTheEnd = (rows) => rows.flatMap((row, k) => {
  const before = rows[k - 1];
  const ends = before && [1, 2].some((n) => isInstant(before[n]) && !isInstant(row[n]));
  return ends && before[0] < row[0] - 1 ? [[row[0] - 1, before[1], before[2]], row] : [row];
});

function Chart({ columns, marks, setLeft, shown, zone, zoomTo, label }) {
  const readout = useRef(null);
  const latest = useRef({});
  latest.current = { zoomTo, marks, setLeft };
  const options = () => optionsOf(zone, {
    zoom: (from, to) => latest.current.zoomTo(from, to),
    mark: (made) => latest.current.setLeft(place(made, latest.current.marks)),
    tell: (made, text) => (readout.current.textContent = [text, ...wordsAt(made, latest.current.marks, zone)].filter(Boolean).join("; ")),
  });
  const box = usePlot({ columns, shown, zone, height: HEIGHT, options, on: [marks] });
  return html`<div class="chart" role="img" aria-label=${label} ref=${box}></div>
    <p class="readout" ref=${readout} aria-hidden="true"></p>`;
}

function optionsOf(zone, { zoom, mark, tell }) {
  return {
    cursor: { drag: { x: true, y: false, setScale: false }, y: false },
    scales: { x: { time: true, auto: false }, y: { time: true, range: padded } },
    axes: axes(times(zone), (made, ...others) => (hasValues(made.data) ? times(zone)(made, ...others) : []), {}, { space: 40 }),
    series: [{}, steps("output", "--output"), steps("input", "--input", { dash: [6, 4] })],
    hooks: {
      draw: [mark],
      setSelect: [(made) => {
        const { left, width: wide } = made.select;
        if (wide < 4) return;
        zoom(made.posToVal(left, "x"), made.posToVal(left + wide, "x"));
        made.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      setCursor: [(made) => {
        const { idx } = made.cursor;
        const [at, output, input] = made.data.map((column) => column[idx ?? 0]);
        tell(made, idx === null || at === undefined ? ""
          : `at ${instant(at, zone)}: output ${instant(output, zone)}${input === null ? "" : `, input ${instant(input, zone)}`}`);
      }],
    },
  };
}

/** Without a watermark, the axis of watermarks has no labels: any would be made up. */
const hasValues = ([, ...lines]) => lines.some((line) => line.some((value) => value !== null));

/** What a chart without a line stands for. */
function emptyText(points, stage) {
  if (isEnd(stage?.output_watermark)) return "The watermark is at the end of time.";
  const some = points.some((each) => each.output_watermark !== null);
  return some ? "" : "The stage does not have a watermark in this time.";
}

/** A stage that stands still has no range of its own: then some time around it is shown. */
function padded(_, low, high) {
  if (low === null) return [now() - DEFAULT_MS, now()];
  const room = Math.max((high - low) * 0.05, LEAST_ROOM_MS);
  return [low - room, high + room];
}

/** The time since the step before. A first watermark has none. */
function after(point, before) {
  if (!before) return "–";
  const isFirst = before.output_watermark === null && point.output_watermark !== null;
  return isFirst ? "at first" : duration(point.at - before.at);
}

/** The same in lines, for who does not see the chart. */
function Steps({ points, zone }) {
  const last = points.slice(-50).reverse();
  const has = last.some((each) => each.records !== null);
  const per = (k, name) => perSecond(last[k].records === null || (last[k + 1]?.records ?? null) === null ? null : rate(last[k + 1], last[k], name));
  return html`<details><summary>${last.length === 1 ? "The last step" : `The last ${last.length} steps`} as a table</summary><div class="scroll"><table class="cards steps">
    <thead><tr><th scope="col">At</th><th scope="col">Output watermark</th><th scope="col">Input watermark</th>
      <th scope="col">After</th><th scope="col">Status</th>${has && html`<th scope="col">Rows a second</th><th scope="col">Late rows a second</th>`}</tr></thead>
    <tbody>${last.map((each, k) => html`<tr key=${each.at}><td data-label="At" class="time">${instant(each.at, zone)}</td>
      <td data-label="Output watermark" class="time">${instant(each.output_watermark, zone)}</td>
      <td data-label="Input watermark" class="time">${each.input_watermark === null ? "–" : instant(each.input_watermark, zone)}</td>
      <td data-label="After">${after(each, last[k + 1])}</td>
      <td data-label="Status">${signOf(each.status)} ${wordOf(each.status)}</td>
      ${has && html`<td data-label="Rows a second">${per(k, "records")}</td><td data-label="Late rows a second">${per(k, "late")}</td>`}</tr>`)}</tbody></table></div></details>`;
}
