/** What is shown in place of a view that cannot be drawn: the rest of the page goes on. */
import { Component, html } from "../lib/html.js";

export class Boundary extends Component {
  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    console.error("a view cannot be drawn", error);
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<div role="alert" class="alert"><p>This view cannot be drawn: ${String(error?.message ?? error)}</p>
      <p>That is a fault of the page, not of the job.
        <button type="button" onClick=${() => this.setState({ error: null })}>Try again</button></p></div>`;
  }
}
