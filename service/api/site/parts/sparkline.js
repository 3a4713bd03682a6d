/** A small picture of how a watermark has moved in the last hour. It is read once it can be seen. */
import { pathOf, read } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { isInstant } from "../lib/time.js";

const SIZE = { width: 120, height: 28 };
const POINTS = 40;
const REFRESH_MS = 30_000;
const SPAN_MS = 3_600_000;

export function Sparkline({ job, stage }) {
  const element = useRef(null);
  const [points, setPoints] = useState(/** @type {any[]} */ ([]));
  useEffect(() => {
    const ending = new AbortController();
    let timer = 0;
    const load = async () => {
      try {
        const path = `${pathOf(job, stage)}/history?points=${POINTS}`;
        setPoints((await read(path, { signal: ending.signal })).points);
      } catch {
        // The table says what is wrong.
      }
      if (!ending.signal.aborted) timer = setTimeout(load, REFRESH_MS);
    };
    const seen = new IntersectionObserver((entries) => {
      clearTimeout(timer);
      if (entries.some((entry) => entry.isIntersecting)) load();
    });
    seen.observe(element.current);
    return () => {
      seen.disconnect();
      ending.abort();
      clearTimeout(timer);
    };
  }, [job, stage]);
  const moved = points.filter((each) => isInstant(each.output_watermark));
  const still = points.at(-1)?.output_watermark === points[0]?.output_watermark;
  const label = still ? "has not moved in the last hour" : "moved in the last hour";
  return html`<svg ref=${element} class="spark" role="img" aria-label=${label} width=${SIZE.width}
    height=${SIZE.height} viewBox=${`0 0 ${SIZE.width} ${SIZE.height}`}><path d=${line(moved)} /></svg>`;
}

function line(points) {
  if (!points.length) return "";
  const last = Date.now();
  const values = points.map((each) => each.output_watermark);
  const low = values[0];
  const high = Math.max(values[values.length - 1], low + 1);
  const x = (at) => Math.max(0, Math.min(1, 1 - (last - at) / SPAN_MS)) * SIZE.width;
  const y = (value) => SIZE.height - 3 - ((value - low) / (high - low)) * (SIZE.height - 6);
  const steps = points.map((each) => `H${x(each.at).toFixed(1)}V${y(each.output_watermark).toFixed(1)}`);
  return `M${x(points[0].at).toFixed(1)} ${y(low).toFixed(1)}${steps.join("")}H${SIZE.width}`;
}
