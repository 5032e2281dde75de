// The token, if the API wants one: in this tab's session storage, and nowhere else.

import { byId } from "./dom.js";

const NAME = "duetime-token";

export const authorised = () => {
  const token = sessionStorage.getItem(NAME);
  return token ? { Authorization: `Bearer ${token}` } : {};
};

let asked = null;

// Ends when another token is given. All who ask at once wait for the same.
export function newToken(refused) {
  asked ??= ask(refused).finally(() => { asked = null; });
  return asked;
}

function ask(refused) {
  const dialog = byId("ask-token");
  const field = dialog.querySelector("input");
  byId("token-wrong").textContent = refused ? "The API does not know this token." : "";
  field.value = "";
  field.oninvalid = () => {
    // Others cannot be sent in a header.
    if (field.validity.patternMismatch) byId("token-wrong").textContent = "A token has letters, digits and signs of ASCII, and no spaces.";
  };
  return new Promise((resolve) => {
    const submitted = () => {
      sessionStorage.setItem(NAME, field.value);
      field.value = "";
      byId("forget").hidden = false;
      dialog.onclose = null;
      resolve();
    };
    dialog.querySelector("form").onsubmit = submitted;
    // Without one there is nothing to see. A browser lets Escape close it the second time at least.
    dialog.onclose = () => dialog.showModal();
    dialog.showModal();
  });
}

export function beginToken() {
  byId("forget").hidden = !sessionStorage.getItem(NAME);
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(NAME);
    location.reload();
  });
}
