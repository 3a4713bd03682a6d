/**
 * What is known of one job: its stages as the event stream has them, its graph, and why it stands.
 *
 * Events are taken in as they come. Whoever draws is told at most once for each picture.
 */
import { pathOf, read } from "./api.js";
import { follow } from "./events.js";
import { atMostEvery, oncePerFrame } from "./frames.js";

/**
 * @typedef {object} Stage
 * @property {string} stage
 * @property {number} generation
 * @property {number} version
 * @property {"unknown" | "active" | "idle" | "final"} status
 * @property {string | null} [health]
 * @property {number | null} input_watermark
 * @property {number | null} output_watermark
 * @property {{total: number, reported: number, idle: number, final: number, leased: number, retired?: number}} ranges
 * @property {string} updated_at
 * @property {number | null} [processing_watermark]
 * @property {number | null} [system_lag_ms]
 * @property {number} [records]
 * @property {number} [late]
 * @property {number | null} [corrections]
 * @property {Record<string, number | null>} [percentiles]
 * @property {true} [input_ended]
 * @property {number} [late_ranges]
 *
 * @typedef {{stage: string, inputs: string[], kind: string, ranges: number}} Node
 * @typedef {{state: "connecting" | "live" | "lost" | "refused", problem?: Error, since: number}} Connection
 */

/** What follows from facts (lags, counts) changes without an event, so it is read every now and then. */
const SOFT_MS = 2_000;
const SOFT_MANY_MS = 10_000;
const MANY_STAGES = 100;
/** How often a job is looked for that is not there: somebody may define it again. */
const GONE_MS = 2_000;

/**
 * What moves when a run begins or ends, or an operator acts: lists of these are read again at once.
 * @param {Stage | undefined} stage
 * @returns {unknown[]}
 */
export const steps = (stage) => [stage?.generation, stage?.health, stage?.status, stage?.ranges.total, stage?.ranges.retired, stage?.late_ranges];

/** What an explanation depends on, beside the lags. @param {Stage | undefined} stage */
const summaryOf = (stage) => [...steps(stage), stage?.version, stage?.input_ended, stage?.ranges.reported,
  stage?.ranges.idle, stage?.ranges.final].join(" ");

export class JobStore {
  /** @param {string} job @param {() => void} changed */
  constructor(job, changed) {
    this.job = job;
    /** @type {Map<string, Stage>} */
    this.stages = new Map();
    /** Each stage after its inputs. @type {Map<string, Node> | null} */
    this.graph = null;
    /** @type {any} */
    this.throttle = null;
    /** @type {Connection} */
    this.connection = { state: "connecting", since: Date.now() };
    /** Rises with each change of any stage: of its watermarks, its state or its ranges, and of the throttle. */
    this.version = 0;
    this._ending = new AbortController();
    /** @type {Map<string, Set<() => void>>} */
    this._watching = new Map();
    /** The stages that have changed since the last picture. */
    this._moved = new Set();
    this._changed = oncePerFrame(() => {
      const moved = this._moved;
      this._moved = new Set();
      for (const name of moved) this._watching.get(name)?.forEach((redraw) => redraw());
      changed();
    });
    this._readGraph = atMostEvery(500, () => this._load("/graph", (body) => this._setGraph(body)));
    this._soft = 0;
    this._again = 0;
  }

  open() {
    this._follow();
    this._readGraph();
    this._readSoft();
  }

  _follow() {
    const signal = this._ending.signal;
    follow(`${pathOf(this.job)}/events`, {
      open: () => this._opened(),
      event: (name, data) => this._event(name, data),
      lost: (problem) => this._connection("lost", problem),
      refused: (problem) => this._refused(problem),
    }, signal);
  }

  close() {
    this._ending.abort();
    this._changed.cancel();
    this._readGraph.cancel();
    clearTimeout(this._soft);
    clearTimeout(this._again);
  }

  /**
   * Call this for each picture in which a stage is another: of a thousand stages, few have to be drawn again.
   * @param {string} name @param {() => void} redraw
   * @returns {() => void} what ends it
   */
  watch(name, redraw) {
    if (!this._watching.has(name)) this._watching.set(name, new Set());
    this._watching.get(name).add(redraw);
    return () => this._watching.get(name).delete(redraw);
  }

  _opened() {
    this._connection("live");
    // What was missed meanwhile may be more than stages.
    this._readGraph();
  }

  /** @param {import("./api.js").Problem} problem */
  _refused(problem) {
    if (problem.status === 404) {
      // Nothing of what was shown is left. A job of that name that is defined later is another one.
      this.graph = null;
      this.stages.clear();
      this.throttle = null;
      this._again = setTimeout(() => this._follow(), GONE_MS);
    }
    this._connection("refused", problem);
  }

  _connection(state, problem) {
    const since = state === this.connection.state ? this.connection.since : Date.now();
    this.connection = { state, problem, since };
    this._changed();
  }

  _event(name, data) {
    if (name === "watermark") this._take(data);
    else if (name === "throttle") this._setThrottle(data);
    else if (name === "stages") this._keepOnly(data.stages);
    this._changed();
  }

  /** The stages with throttled shards, before and after, are drawn again. */
  _setThrottle(body) {
    for (const each of [this.throttle, body]) {
      for (const name of Object.keys(each?.shards ?? {})) this._moved.add(name);
    }
    this.throttle = body;
    this.version += 1;
  }

  /** @param {Stage} body */
  _take(body) {
    const known = this.stages.get(body.stage);
    if (known && (body.generation < known.generation
      || (body.generation === known.generation && body.version < known.version))) return;
    this.stages.set(body.stage, body);
    this._moved.add(body.stage);
    if (summaryOf(body) !== summaryOf(known)) this.version += 1;
    // In another generation the job may have been deleted and defined again, with other edges.
    const isAnew = known && body.generation !== known.generation;
    if (isAnew || (this.graph && !this.graph.has(body.stage))) this._readGraph();
  }

  _setGraph(body) {
    this.graph = new Map(body.stages.map((node) => [node.stage, node]));
    for (const name of this.stages.keys()) {
      if (!this.graph.has(name)) this.stages.delete(name);
    }
  }

  /** @param {string[]} names All stages that there are: others were removed. */
  _keepOnly(names) {
    const there = new Set(names);
    for (const name of this.stages.keys()) {
      if (!there.has(name)) this.stages.delete(name);
    }
    this._readGraph();
  }

  async _readSoft() {
    if (!document.hidden && this.connection.state === "live") {
      await this._load("/watermarks", (body) => {
        for (const stage of Object.values(body.watermarks)) this._take(stage);
        const names = Object.keys(body.watermarks);
        if (this.graph && names.length !== this.graph.size) this._readGraph();
      });
    }
    if (this._ending.signal.aborted) return;
    const ms = this.stages.size > MANY_STAGES ? SOFT_MANY_MS : SOFT_MS;
    this._soft = setTimeout(() => this._readSoft(), ms);
  }

  async _load(path, take) {
    try {
      take(await read(pathOf(this.job) + path, { signal: this._ending.signal }));
      this._changed();
    } catch {
      // The stream knows, and says it.
    }
  }
}
