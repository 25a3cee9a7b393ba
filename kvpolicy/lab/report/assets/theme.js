// Light, dark, or the system's theme: a button cycles through them.

import { button } from "./dom.js";

const NAMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

/** The button; what was chosen is remembered where the browser lets a file remember things. */
export function themeButton() {
  let theme = recall();
  const one = button("", () => show(next(theme)), { class: "quiet", id: "theme" });
  const show = (name) => {
    theme = name;
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    one.textContent = NAMES[name];
    remember(name);
  };
  show(theme);
  return one;
}

function next(theme) {
  const names = Object.keys(NAMES);
  return names[(names.indexOf(theme) + 1) % names.length];
}

function recall() {
  try {
    const found = localStorage.getItem("kvpolicy-theme");
    return found in NAMES ? found : "auto";
  } catch {
    return "auto";
  }
}

function remember(name) {
  try {
    localStorage.setItem("kvpolicy-theme", name);
  } catch {
    // Forgotten, then.
  }
}
