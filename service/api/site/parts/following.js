/** Components that are drawn again only when there is something new. */
import { Component } from "../lib/html.js";

/** Drawn again only if one of its properties is another. */
export class Unchanged extends Component {
  shouldComponentUpdate(next) {
    for (const name in next) if (next[name] !== this.props[name]) return true;
    return false;
  }
}

/** And when one of the stages that it shows has changed. */
export class Following extends Unchanged {
  /** @returns {string[]} the stages, which are the same for as long as it lives */
  names() {
    return [this.props.name];
  }

  componentDidMount() {
    const redraw = () => this.forceUpdate();
    this.ends = this.names().map((name) => this.props.store.watch(name, redraw));
  }

  componentWillUnmount() {
    this.ends.forEach((end) => end());
  }
}
