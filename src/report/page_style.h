#pragma once

namespace lockstep {

/// The page's style. Its colours (blue, orange, teal, ...) can be told apart by people with colour blindness.
constexpr const char* kPageStyle = R"css(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#16191d;--soft:#5b6570;--rule:#e3e7ec;--axis:#9aa4af;
--c1:#2563eb;--c2:#d9650b;--c3:#0f8a75;--c4:#9333ea;--c5:#b8336a;--c6:#6b7280;--wait:#f2b8a0;--still:#d9650b18;--good:#0f7a4a;--bad:#b42318;--warn:#b7791f}
@media (prefers-color-scheme:dark){:root{--bg:#0f1216;--card:#171b21;--ink:#e8ebef;--soft:#9ba6b2;--rule:#272d36;--axis:#5d6772;
--c1:#6ea3ff;--c2:#f59b4c;--c3:#45c7ae;--c4:#c38bff;--c5:#f07fae;--c6:#9ca3af;--wait:#7d4a33;--still:#f59b4c1c;--good:#4ccf8f;--bad:#ff8a7a;--warn:#d9b13f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;margin-bottom:18px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
header p{margin:0;color:var(--soft);flex-basis:100%}
.state{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor}
.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin:0 0 14px}
.tile,.card,.notes{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tile{padding:12px 14px;display:flex;flex-direction:column}
.tile dt{color:var(--soft);font-size:13px;order:1}
.tile dd{margin:0;order:2;font-size:21px;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums}
.tile dd+dd{order:3;font-size:13px;font-weight:400;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));grid-auto-flow:dense;gap:14px}
.card{padding:16px 18px 12px;min-width:0}
.full{grid-column:1/-1}
h2{font-size:16px;margin:0 0 2px}
h2 small{font-weight:400;color:var(--soft);font-size:13px;margin-left:6px}
.card>p{margin:2px 0 8px;color:var(--soft);font-size:13px}
.missing{padding:14px 0 0}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:4px 0 8px;padding:0;font-size:13px;color:var(--soft)}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums;margin-left:4px}
.key{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:7px;vertical-align:middle;background:currentColor}
.key.box{height:10px}.key.thin{height:2px}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}
svg{display:none;width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg text.label{fill:var(--ink);font-size:12px}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .axis{stroke:var(--axis);stroke-width:1}
svg .epoch{stroke:var(--axis);stroke-width:1;stroke-dasharray:2 4;opacity:.6}
svg .mark{stroke:var(--ink);stroke-width:1.5}
svg .line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .band{fill:currentColor;opacity:.18;stroke:none}
svg .dot{fill:currentColor;stroke:none}
svg .cross{stroke:var(--soft);stroke-width:1}
.reduce{fill:var(--c1);background:var(--c1)}.queued{fill:var(--c1);background:var(--c1);opacity:.35}
.arrive{fill:var(--c6);background:var(--c6)}.ready{fill:var(--ink);background:var(--ink)}.late{fill:var(--c2);background:var(--c2)}
.compute{fill:var(--c3);background:var(--c3)}.wait{fill:var(--wait);background:var(--wait)}.still{fill:var(--still);background:var(--still)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:5px 0;border-top:1px solid var(--rule);overflow-wrap:anywhere}
tr:first-child>*{border-top:0}
th{font-weight:400;color:var(--soft);width:34%;padding-right:14px}
pre{margin:6px 0 8px;padding:10px 12px;background:var(--bg);border-radius:6px;font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere}
ul.files{margin:4px 0 6px;padding:0;list-style:none;font-size:14px}
ul.files li{padding:5px 0;border-top:1px solid var(--rule);overflow-wrap:anywhere}
ul.files li:first-child{border-top:0}
ul.files span{color:var(--soft);font-size:13px;margin-left:8px}
a{color:var(--c1)}
.notes{padding:10px 18px;margin:0 0 14px;border-left:4px solid var(--warn);font-size:14px}
.notes ul{margin:4px 0;padding-left:20px}
footer{color:var(--soft);font-size:13px;margin-top:18px}
#tip{position:fixed;z-index:2;pointer-events:none;display:none;background:var(--card);color:var(--ink);border:1px solid var(--axis);border-radius:6px;padding:6px 10px;font-size:13px;line-height:1.45;box-shadow:0 2px 10px #0003;white-space:nowrap;font-variant-numeric:tabular-nums}
#tip div{display:flex;align-items:center}
#tip b{margin-left:auto;padding-left:14px}
@media (min-width:1060px){svg.wide{display:block}}
@media (min-width:560px) and (max-width:1059.98px){svg.middle{display:block}.cards{grid-template-columns:minmax(0,1fr)}}
@media (max-width:559.98px){svg.narrow{display:block}.cards{grid-template-columns:minmax(0,1fr)}
main{padding:18px 12px 32px}.card{padding:14px 12px 10px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:8px}.tile{padding:10px 12px}.tile dd{font-size:19px}h1{font-size:22px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
)css";

}  // namespace lockstep
