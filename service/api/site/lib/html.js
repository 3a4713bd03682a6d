/** Preact with tagged templates in place of JSX, so that nothing has to be compiled. */
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { Component, h, render } from "preact";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
