// What keeps somebody from using the page: a list of sentences, empty where all is well.
() => {
  const wrong = [];
  const seen = (each) => each.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const called = (each) =>
    (each.getAttribute("aria-label") ?? each.labels?.[0]?.textContent ?? each.textContent ?? "").trim();
  const where = (each) => `${each.tagName.toLowerCase()}${each.id ? `#${each.id}` : ""}.${each.getAttribute("class") ?? ""}`;

  for (const each of document.querySelectorAll("button, a, input, summary, [role=region], [role=img]")) {
    if (seen(each) && !called(each)) wrong.push(`${where(each)} has no name`);
  }
  for (const each of document.querySelectorAll("section, dialog")) {
    const title = document.getElementById(each.getAttribute("aria-labelledby"));
    if (!title) wrong.push(`${where(each)} has no title`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  if (new Set(ids).size !== ids.length) wrong.push("two elements have one id");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("there is not one h1");
  if (!document.documentElement.lang) wrong.push("the language is not said");
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`wider than the window: ${document.documentElement.scrollWidth}`);

  const painter = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    painter.clearRect(0, 0, 1, 1);
    painter.fillStyle = colour;
    painter.fillRect(0, 0, 1, 1);
    return [...painter.getImageData(0, 0, 1, 1).data];
  };
  const light = ([red, green, blue]) => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
  };
  const ground = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba("Canvas");
  };
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !seen(each) || each.closest("svg")) continue;
    const [more, less] = [light(rgba(getComputedStyle(each).color)), light(ground(each))].sort((a, b) => b - a);
    const contrast = (more + 0.05) / (less + 0.05);
    if (contrast < 4.5) wrong.push(`${where(each)}: contrast ${contrast.toFixed(2)}`);
  }
  return wrong;
}
