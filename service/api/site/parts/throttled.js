/** The throttled shards of a stage, and why. */
import { html } from "../lib/html.js";
import { unbroken } from "../lib/text.js";
import { counted, instant, moments } from "../lib/time.js";

const MOST = 50;

/** @param {{throttle: any, stage: string, zone: import("../lib/time.js").Zone}} props */
export function Throttled({ throttle, stage, zone }) {
  const shards = Object.entries(throttle?.shards[stage] ?? {});
  if (!shards.length) return null;
  return html`<section aria-labelledby="throttled-title">
    <h2 id="throttled-title">Throttled: ${counted(shards.length, "shard")}</h2>
    <div class="scroll"><table class="cards">
      <thead><tr><th scope="col">Shard</th><th scope="col">Throttle</th><th scope="col">Because</th></tr></thead>
      <tbody>${shards.slice(0, MOST).map(([shard, advice]) => html`<tr key=${shard}>
        <th scope="row">${shard}</th>
        <td data-label="Throttle">${unbroken(told(advice, zone))}</td>
        <td data-label="Because">${unbroken(moments(advice.because, zone))}</td></tr>`)}</tbody></table></div>
    ${shards.length > MOST && html`<p>and ${shards.length - MOST} more</p>`}
  </section>`;
}

const told = ({ pause, rate, until }, zone) => (pause ? "pause" : `read at ${Math.round(rate * 100)} %`)
  + (until === null ? "" : ` beyond ${instant(until, zone)}`);
