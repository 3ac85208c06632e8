#pragma once

namespace lockstep {

/// Shows the values of the curves under the pointer, read back from the drawing. Everything else on the page works
/// without it.
constexpr const char* kPageScript = R"js(
(() => {
  'use strict';
  const tip = document.getElementById('tip');
  const svgName = 'http://www.w3.org/2000/svg';
  const number = v => {
    const size = Math.abs(v);
    if (size >= 1000 && size < 1e9) return Math.round(v).toLocaleString('en');
    return size !== 0 && (size < 1e-4 || size >= 1e9) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
  };
  const range = text => text.split(' ').map(Number);
  const nearest = (points, x) => points.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best, points[0]);
  for (const svg of document.querySelectorAll('svg[data-x]')) {
    const [x0, x1, left, right] = range(svg.dataset.x), [y0, y1, bottom, top] = range(svg.dataset.y);
    const kind = svg.dataset.kind;
    const step = x => x0 + (x - left) / (right - left) * (x1 - x0);
    const value = y => {
      const part = (y - bottom) / (top - bottom);
      return kind === 'log' ? y0 * Math.pow(y1 / y0, part) : y0 + part * (y1 - y0);
    };
    const lines = [...svg.querySelectorAll('polyline.line')].map(line => ({
      name: line.dataset.name, colour: line.classList[1],
      points: line.getAttribute('points').split(' ').map(p => p.split(',').map(Number))}));
    if (lines.length === 0) continue;
    const marks = document.createElementNS(svgName, 'g');
    svg.append(marks);
    const hide = () => { tip.style.display = 'none'; marks.replaceChildren(); };
    const show = event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      if (x < left - 8 || x > right + 8) return hide();
      const found = lines.map(line => ({line, point: nearest(line.points, x)}));
      const anchor = found.reduce((a, b) => Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a).point[0];
      const cross = document.createElementNS(svgName, 'line');
      for (const [key, v] of Object.entries({x1: anchor, x2: anchor, y1: top, y2: bottom, class: 'cross'})) cross.setAttribute(key, v);
      marks.replaceChildren(cross);
      tip.replaceChildren();
      const head = document.createElement('div');
      head.textContent = 'step ' + number(Math.round(step(anchor)));
      tip.append(head);
      for (const {line, point} of found) {
        if (Math.abs(point[0] - anchor) > (right - left) * 0.06) continue;
        const dot = document.createElementNS(svgName, 'circle');
        for (const [key, v] of Object.entries({cx: point[0], cy: point[1], r: 4, class: 'dot ' + line.colour})) dot.setAttribute(key, v);
        marks.append(dot);
        const row = document.createElement('div'), key = document.createElement('span'), text = document.createElement('b');
        key.className = 'key ' + line.colour;
        text.textContent = kind === 'share' ? number(100 * value(point[1])) + ' %' : number(value(point[1]));
        row.append(key, line.name, text);
        tip.append(row);
      }
      tip.style.display = 'block';
      const place = event.clientX + 16 + tip.offsetWidth < innerWidth ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth;
      tip.style.left = Math.max(4, place) + 'px';
      tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + 'px';
    };
    svg.addEventListener('pointermove', show);
    svg.addEventListener('pointerdown', show);
    svg.addEventListener('pointerleave', hide);
  }
})();
)js";

}  // namespace lockstep
