/** Asks for a key. It is kept for this tab alone, and sent with each request. */
import { key, whoAmI } from "../lib/api.js";
import { html, useState } from "../lib/html.js";

export function Login({ refused, onEnter }) {
  const [problem, setProblem] = useState(refused);
  const enter = async (event) => {
    event.preventDefault();
    const secret = new FormData(event.target).get("key").toString().trim();
    try {
      const me = await whoAmI(secret);
      key.set(secret);
      onEnter(me);
    } catch (failed) {
      setProblem(failed);
    }
  };
  return html`<main class="login">
    <h1>tidegauge</h1>
    <form onSubmit=${enter}>
      <label for="key">Key</label>
      <input id="key" name="key" type="password" autocomplete="off" required spellcheck="false"
        aria-describedby="key-help" autofocus />
      <p id="key-help" class="help">Begins with <code>tg_</code>. It is kept until this tab is closed.
        An operator makes one: <code>tidegauge keys create NAME --role read</code></p>
      ${problem && html`<p role="alert" class="alert">${problem.message}</p>`}
      <button type="submit">Log in</button>
    </form>
  </main>`;
}
