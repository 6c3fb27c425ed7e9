// The dialog for the API key.

import { storedKey, storeKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** Resolves for all callers once the user has entered a key. */
export function askForKey(error) {
  asking ??= new Promise((resolve) => {
    const [dialog, form, field] = [byId("key-dialog"), byId("key-form"), byId("key")];
    byId("key-reason").textContent = storedKey() && error ? error.message : "";
    form.onsubmit = (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      storeKey(field.value.trim());
      field.value = "";
      dialog.close();
      byId("new-key").hidden = false;
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

export function wireKey() {
  byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  byId("new-key").hidden = !storedKey();
  byId("new-key").addEventListener("click", () => askForKey(null));
}
