// Before anything is drawn, so that a dark page never flashes white.
(() => {
  const chosen = localStorage.getItem("tidegauge.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
