/** What changes a job, for keys that may: each asks for the job's name first. */
import { pathOf, send } from "../lib/api.js";
import { html, useRef, useState } from "../lib/html.js";
import { go, link } from "../lib/route.js";

const DEEDS = {
  reset: {
    name: "Reset",
    about: "All watermarks, promises, leases, runs and epochs of the job start over, as its next generation."
      + " Stop its queries first, and give every query a new checkpoint and an empty output.",
    run: (job) => send(`${pathOf(job)}/reset`, { method: "POST" }),
  },
  delete: {
    name: "Delete",
    about: "The job and all its state are deleted. Workers that report for it get an error.",
    run: (job) => send(pathOf(job), { method: "DELETE" }).then(() => go(link())),
  },
};

/** @param {{job: string, me: import("../lib/api.js").Me}} props */
export function Danger({ job, me }) {
  if (me.role !== "admin") return null;
  return html`<section class="danger" aria-labelledby="danger-title"><h2 id="danger-title">Change this job</h2>
    <div class="tools">${Object.keys(DEEDS).map((deed) => html`<${Deed} key=${deed} job=${job} deed=${DEEDS[deed]} />`)}</div>
  </section>`;
}

function Deed({ job, deed }) {
  const dialog = useRef(null);
  const [typed, setTyped] = useState("");
  const [problem, setProblem] = useState(null);
  const title = `${deed.name}-title`;
  const run = async (event) => {
    event.preventDefault();
    if (typed !== job) return;
    try {
      await deed.run(job);
      dialog.current?.close();
    } catch (failed) {
      setProblem(failed);
    }
  };
  const open = () => {
    setTyped("");
    setProblem(null);
    dialog.current.showModal();
  };
  return html`<button type="button" onClick=${open}>${deed.name}…</button>
    <dialog ref=${dialog} aria-labelledby=${title}><form onSubmit=${run}>
      <h3 id=${title}>${deed.name} ${job}?</h3>
      <p>${deed.about}</p>
      <label>Type the job's name <input value=${typed} onInput=${(event) => setTyped(event.target.value)}
        autocomplete="off" spellcheck="false" /></label>
      ${problem && html`<p role="alert" class="alert">${problem.message}</p>`}
      <div class="tools"><button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button type="submit" class="dangerous" disabled=${typed !== job}>${deed.name}</button></div>
    </form></dialog>`;
}
