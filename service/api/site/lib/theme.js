/** Light, dark, or what the machine prefers. */
import { useEffect, useState } from "./html.js";

const KEY = "tidegauge.theme";
const THEMES = ["auto", "light", "dark"];

export const chosenTheme = () => document.documentElement.dataset.theme ?? "auto";

/** @returns {string} the theme after this one */
export function nextTheme() {
  const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
  if (next === "auto") {
    localStorage.removeItem(KEY);
    delete document.documentElement.dataset.theme;
  } else {
    localStorage.setItem(KEY, next);
    document.documentElement.dataset.theme = next;
  }
  dispatchEvent(new Event("themechange"));
  return next;
}

/** Rises whenever colours change, for what is drawn on a canvas. */
export function useTheme() {
  const [changes, setChanges] = useState(0);
  useEffect(() => {
    const redraw = () => setChanges((count) => count + 1);
    const machine = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", redraw);
    machine.addEventListener("change", redraw);
    return () => {
      removeEventListener("themechange", redraw);
      machine.removeEventListener("change", redraw);
    };
  }, []);
  return changes;
}

/** @param {string} name of a custom property */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
