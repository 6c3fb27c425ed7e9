// Notices above the input box. A notice stays until it is dismissed or resolved.

import { button, element } from "./dom.js";

export class Notices {
  /** place: the element to show them in. */
  constructor(place) {
    this.place = place;
    this.all = []; // [kind, element]
  }

  /** Show a notice. kind: its subject; act: a button's label and callback. */
  add(kind, words, act = null) {
    const shown = element("p", {}, element("span", {}, words));
    const dismiss = () => this.#keep(([, each]) => each !== shown);
    if (act) shown.append(button(act[0], () => (dismiss(), act[1]())));
    shown.append(button("×", dismiss, { class: "away", "aria-label": "Dismiss" }));
    this.all.push([kind, shown]);
    this.place.append(shown);
    this.place.hidden = false;
  }

  has(kind) {
    return this.all.some(([each]) => each === kind);
  }

  /** Remove the notices of these kinds. */
  clear(...kinds) {
    this.#keep(([kind]) => !kinds.includes(kind));
  }

  /** Dismiss all. */
  dismiss() {
    this.#keep(() => false);
  }

  #keep(stays) {
    this.all = this.all.filter(stays);
    this.place.replaceChildren(...this.all.map(([, shown]) => shown));
    this.place.hidden = !this.all.length;
  }
}
