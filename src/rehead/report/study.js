// Selects one variant's attention maps; maps side by side show the same layer and head. On paper all details are open.
addEventListener("DOMContentLoaded", () => {
  const chosen = document.querySelector("#maps > p select");
  chosen?.addEventListener("change", () => {
    document.querySelectorAll("#maps .one").forEach((one, index) => one.classList.toggle("shown", index === Number(chosen.value)));
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
  const beside = document.querySelector("#maps.beside");
  beside?.addEventListener("change", (event) => {
    const { name, value } = event.target;
    if (name !== "layer" && name !== "head") return;
    for (const other of beside.querySelectorAll(`[name=${name}]`)) {
      if (other.value === value || ![...other.options].some((option) => option.value === value)) continue;
      other.value = value;
      other.dispatchEvent(new Event("change", { bubbles: true }));
    }
  });
});
