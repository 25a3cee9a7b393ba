// The only module that creates elements. Text becomes text nodes, never markup, so texts that
// models wrote are not interpreted.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `props`: attributes; functions under `on` + event; children: nodes or text. */
export function h(tag, props = {}, ...children) {
  return furnish(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), props, children);
}

function furnish(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

/** Replace all children. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

const MARKS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Text with the letters shown that nobody would see, and broken ones replaced. */
export function visible(text) {
  const marked = String(text).replace(MARKS, (letter) => {
    const code = letter.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
  return marked.toWellFormed ? marked.toWellFormed() : marked;
}

/** A button. */
export function button(label, onclick, props = {}) {
  return h("button", { type: "button", onclick, ...props }, label);
}

/** A labelled choice. `options`: [[value, text], ...]. */
export function select(label, options, value, onchange, props = {}) {
  const field = h("select", { onchange: () => onchange(field.value), ...props });
  for (const [key, text] of options) field.append(h("option", { value: key }, text));
  field.value = value;
  return h("label", { class: "field" }, h("span", {}, label), field);
}
