/** Retiring a range, for keys that may: first it is shown which watermarks move, and how far. */
import { pathOf, send } from "../lib/api.js";
import { html, useRef, useState } from "../lib/html.js";
import { unbroken } from "../lib/text.js";
import { instant, isEnd } from "../lib/time.js";

/** @param {{route: any, range: string, zone: import("../lib/time.js").Zone}} props */
export function Retire({ route, range, zone }) {
  const dialog = useRef(null);
  const [because, setBecause] = useState("");
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const ask = (body) => send(`${pathOf(route.job, route.stage)}/ranges/${encodeURIComponent(range)}/retire`, {
    method: "POST", body,
  }).then((response) => response.json());
  const open = () => {
    setBecause("");
    setFound(null);
    setProblem(null);
    dialog.current.showModal();
    ask({ because: "preview", dry_run: true }).then(setFound, setProblem);
  };
  const run = async (event) => {
    event.preventDefault();
    const section = event.target.closest("section");
    try {
      await ask({ because });
      dialog.current?.close();
      focusTitle(section);
    } catch (failed) {
      setProblem(failed);
    }
  };
  const title = `retire-${range}`;
  return html`<button type="button" onClick=${open} aria-label=${`Retire ${range}`}>Retire…</button>
    <dialog ref=${dialog} aria-labelledby=${title}><form onSubmit=${run}>
      <h3 id=${title}>Retire ${range} of ${route.stage}?</h3>
      <p>The stage waits for it no longer: it counts as final until its next report, and then holds from where it
        is. Rows that it still has behind the new watermark are late.</p>
      ${found && html`<${Effects} found=${found} zone=${zone} />`}
      <label>Reason <input required maxlength="500" value=${because} autocomplete="off"
        onInput=${(event) => setBecause(event.target.value)} /></label>
      ${problem && html`<p role="alert" class="alert">${problem.message}</p>`}
      <div class="tools"><button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button type="submit" class="dangerous" disabled=${!because || !found}>Retire</button></div>
    </form></dialog>`;
}

/** The button that opened the dialog goes with the retirement, and the row of the range may. */
function focusTitle(section) {
  const title = section.querySelector("h2");
  // On a phone, the title has become the line that unfolds.
  (title.checkVisibility() ? title : section.closest("details").querySelector("summary")).focus();
}

function Effects({ found, zone }) {
  const lines = found.moves.flatMap((move) => ["input", "output"]
    .map((side) => [move.stage, side, move.before[`${side}_watermark`], move.after[`${side}_watermark`]])
    .filter(([, , before, after]) => before !== after));
  return html`${found.holder && html`<p>${found.holder} holds a lease on it: its next report ends the retirement.</p>`}
    ${lines.length ? html`<ul class="effects">${lines.map(([stage, side, before, after]) => html`<li key=${`${stage} ${side}`}>
        ${stage}: ${side} watermark from ${place(before, zone)} to ${place(after, zone)}${side === "output" && isEnd(after)
          ? html`. <strong>${stage} becomes final, which cannot be taken back.</strong>` : ""}</li>`)}</ul>`
    : html`<p>All watermarks stay where they are: another range, or another input, holds them.</p>`}
    ${found.held_by && html`<p>Without ${found.range}, the lowest range of ${found.stage} is ${found.held_by}.</p>`}`;
}

const place = (at, zone) => (at === null ? "none" : isEnd(at) ? "the end of time" : unbroken(instant(at, zone)));
