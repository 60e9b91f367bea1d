// Before the first paint, so that a chosen theme never flashes the other one.
"use strict";
(() => {
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem("cardan-theme");
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  }

  function apply(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  let theme = stored();
  apply(theme);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => (button.textContent = `Theme: ${theme}`);
    show();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      apply(theme);
      show();
      try {
        localStorage.setItem("cardan-theme", theme);
      } catch {
        // it lasts as long as the page
      }
    });
  });
})();
