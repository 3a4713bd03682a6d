/**
 * Where the stages of a graph stand: sources left, sinks right, with few crossings.
 *
 * The usual layered method (Sugiyama): a column for each stage by its longest way from a source, then
 * the order within the columns by the mean of the neighbours, then places. Libraries that place
 * optimally take minutes for a thousand stages; this takes milliseconds.
 */

/**
 * @typedef {{name: string, column: number, y: number, ups: Vertex[], downs: Vertex[], real: boolean}} Vertex
 * @typedef {{x: number, y: number}} Point
 * @typedef {{from: string, to: string, points: Point[]}} Edge
 * @typedef {{places: Map<string, Point>, edges: Edge[], width: number, height: number}} Layout
 */

/** The foot is there only where a stage has badges; each place has room for it. */
export const NODE = { width: 241, height: 78, foot: 22 };
const TALL = NODE.height + NODE.foot;
const GAP = { x: 40, y: 8 };
/** Room of a line that passes a column. */
const LINE = 12;
const SWEEPS = 8;
/** Long edges get a place in each column that they pass, unless there are more than this in all. */
const MOST_BENDS = 4_000;

/** So many columns fit a screen. A column that is taller than `FEWEST` is broken if they suffice. */
const MOST_COLUMNS = 5;
const FEWEST = 3;

/**
 * @param {Map<string, {inputs: string[]}>} stages each after its inputs
 * @returns {Layout}
 */
export function layout(stages) {
  const vertices = new Map([...columnsOf(stages)].map(([name, column]) => [name, vertex(name, column, true)]));
  const chains = connect(stages, vertices);
  const columns = order([...vertices.values(), ...chains.flatMap((chain) => chain.bends)]);
  place(columns);
  return measured(vertices, chains, columns.length);
}

/** The column of each stage: as low as the columns that fit a screen permit, since screens are wide. */
function columnsOf(stages) {
  const natural = filled(stages, Infinity);
  if (Math.max(...natural.values()) >= MOST_COLUMNS) return natural;
  for (let most = FEWEST; most < stages.size; most++) {
    const found = filled(stages, most);
    if (Math.max(...found.values()) < MOST_COLUMNS) return found;
  }
  return natural;
}

/** The column of each stage, after those of its inputs, the first that has fewer than `most` (Coffman and Graham). */
function filled(stages, most) {
  const found = new Map();
  const counts = [];
  for (const [name, { inputs }] of stages) {
    let column = Math.max(-1, ...inputs.map((up) => found.get(up))) + 1;
    while ((counts[column] ?? 0) >= most) column += 1;
    counts[column] = (counts[column] ?? 0) + 1;
    found.set(name, column);
  }
  return found;
}

/** @returns {Vertex} */
const vertex = (name, column, real) => ({ name, column, y: 0, ups: [], downs: [], real });

function connect(stages, vertices) {
  const chains = [];
  let length = 0;
  for (const [name, { inputs }] of stages) {
    for (const up of inputs) {
      const chain = { from: vertices.get(up), to: vertices.get(name), bends: [] };
      chains.push(chain);
      length += chain.to.column - chain.from.column - 1;
    }
  }
  for (const chain of chains) {
    let last = chain.from;
    for (let column = last.column + 1; length <= MOST_BENDS && column < chain.to.column; column++) {
      const bend = vertex("", column, false);
      chain.bends.push(bend);
      join(last, bend);
      last = bend;
    }
    join(last, chain.to);
  }
  return chains;
}

function join(up, down) {
  up.downs.push(down);
  down.ups.push(up);
}

/** @param {Vertex[]} vertices @returns {Vertex[][]} */
function order(vertices) {
  /** @type {Vertex[][]} */
  const columns = [];
  for (const each of vertices) (columns[each.column] ??= []).push(each);
  for (const column of columns) column.forEach((each, row) => (each.y = row));
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const column of down ? columns : [...columns].reverse()) {
      const wanted = new Map(column.map((each) => [each, mean(down ? each.ups : each.downs, each.y)]));
      column.sort((a, b) => wanted.get(a) - wanted.get(b));
      column.forEach((each, row) => (each.y = row));
    }
  }
  return columns;
}

function mean(vertices, otherwise) {
  if (!vertices.length) return otherwise;
  return vertices.reduce((sum, each) => sum + each.y, 0) / vertices.length;
}

/** The height that a vertex takes in its column, with the gap. */
const size = (each) => (each.real ? TALL + GAP.y : LINE);

/** Draw each to its neighbours, without changing the order or coming too close, and as low as the tallest column. */
function place(columns) {
  const sum = (column) => column.reduce((all, each) => all + size(each), 0);
  const tallest = columns.reduce((most, column) => Math.max(most, sum(column)), 0);
  for (const column of columns) {
    let y = 0;
    for (const each of column) {
      each.y = y + size(each) / 2;
      y += size(each);
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    for (const column of sweep % 2 ? [...columns].reverse() : columns) {
      const wanted = column.map((each) => mean(sweep % 2 ? each.downs : each.ups, each.y));
      const apart = (k) => (size(column[k]) + size(column[k - 1])) / 2;
      const low = [...wanted];
      for (let k = 1; k < low.length; k++) low[k] = Math.max(low[k], low[k - 1] + apart(k));
      const high = [...wanted];
      for (let k = high.length - 2; k >= 0; k--) high[k] = Math.min(high[k], high[k + 1] - apart(k + 1));
      let above = 0;
      const spare = tallest - sum(column);
      column.forEach((each, k) => {
        const least = above + size(each) / 2;
        each.y = Math.max(least, Math.min(least + spare, (low[k] + high[k]) / 2));
        above += size(each);
      });
    }
  }
}

function measured(vertices, chains, columns) {
  const step = NODE.width + GAP.x;
  const all = [...vertices.values(), ...chains.flatMap((chain) => chain.bends)];
  const top = all.reduce((least, each) => Math.min(least, each.y - size(each) / 2), Infinity) + GAP.y / 2;
  const bottom = all.reduce((most, each) => Math.max(most, each.y + size(each) / 2), -Infinity) - GAP.y / 2;
  const places = new Map();
  for (const each of vertices.values()) {
    places.set(each.name, { x: each.column * step, y: each.y - top - TALL / 2 });
  }
  // To the middle of a box without its foot.
  const line = top + NODE.foot / 2;
  const edges = chains.map(({ from, to, bends }) => ({
    from: from.name,
    to: to.name,
    points: [
      { x: from.column * step + NODE.width, y: from.y - line },
      ...bends.flatMap(({ column, y }) => [0, NODE.width].map((across) => ({ x: column * step + across, y: y - top }))),
      { x: to.column * step, y: to.y - line },
    ],
  }));
  return { places, edges, width: columns * step - GAP.x, height: bottom - top };
}

/** @param {Point[]} points @returns {string} an SVG path that leaves and arrives horizontally */
export function curve(points) {
  let path = `M${points[0].x} ${points[0].y}`;
  for (let k = 1; k < points.length; k++) {
    const [a, b] = [points[k - 1], points[k]];
    const middle = (a.x + b.x) / 2;
    path += `C${middle} ${a.y} ${middle} ${b.y} ${b.x} ${b.y}`;
  }
  return path;
}
