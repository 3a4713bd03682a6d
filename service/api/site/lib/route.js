/**
 * The address: it holds the whole view, so that a link shows to others what one sees oneself.
 *
 * `#/`, `#/jobs/JOB` and `#/jobs/JOB/stages/STAGE`, each with `?name=value`.
 */

/**
 * @typedef {object} Route
 * @property {"jobs" | "job" | "stage" | "unknown"} view
 * @property {string} job
 * @property {string} stage
 * @property {URLSearchParams} query
 */

/** Kept from one view to the next. */
const KEPT = ["tz"];

/** @param {string} hash @returns {Route} */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decode);
  const route = { view: "unknown", job: "", stage: "", query: new URLSearchParams(query) };
  if (!parts.length) return { ...route, view: "jobs" };
  if (parts[0] !== "jobs") return route;
  if (parts.length === 2) return { ...route, view: "job", job: parts[1] };
  if (parts.length === 4 && parts[2] === "stages") {
    return { ...route, view: "stage", job: parts[1], stage: parts[3] };
  }
  return parts.length === 1 ? { ...route, view: "jobs" } : route;
}

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** @returns {Route} */
export const current = () => parse(location.hash);

/**
 * A link to a job or a stage, or without either to all jobs.
 * @param {{job?: string, stage?: string}} to
 * @param {Record<string, string | number | null>} [query]
 */
export function link(to = {}, query = {}) {
  const search = new URLSearchParams();
  for (const name of KEPT) {
    const value = current().query.get(name);
    if (value) search.set(name, value);
  }
  return format(to, search, query);
}

/**
 * A link to the same view, with some parameters changed; null removes one.
 * @param {Route} route
 * @param {Record<string, string | number | null>} query
 */
export function changed(route, query) {
  return format(route, new URLSearchParams(route.query), query);
}

function format({ job = "", stage = "" }, search, query) {
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === "") search.delete(name);
    else search.set(name, String(value));
  }
  let path = "#/";
  if (job) path += `jobs/${encodeURIComponent(job)}`;
  if (stage) path += `/stages/${encodeURIComponent(stage)}`;
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

/** Go there. With `replace`, the browser's way back leaves it out. */
export function go(to, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = to;
  }
}
