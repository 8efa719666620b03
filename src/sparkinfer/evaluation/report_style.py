"""The style of the HTML report: one column, light and dark by the reader's setting, charts by classes."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5c6570; --line: #e1e4e8; --grid: #eceef1;
  --base: #7a8594; --candidate: #1f6fd6; --band: #f0f2f5; --interval: #1f6fd629;
  --good: #1a7f4b; --bad: #c0362c; --open: #9a6700; --goodback: #e3f4ea; --badback: #fbe6e4; --openback: #fdf1d7;
  --p1: #2a78d6; --p2: #1b9e77; --p3: #d98b0b; --p4: #8a63c9; --p5: #c2527f; --p6: #6b7683; --oninside: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1b1f24; --ink: #e6e9ed; --soft: #9aa4b0; --line: #2e343b; --grid: #262b31;
    --base: #8f9baa; --candidate: #5aa2f5; --band: #22272d; --interval: #5aa2f533;
    --good: #5fcf94; --bad: #ff8a80; --open: #e5b454; --goodback: #17352a; --badback: #43211f; --openback: #3a2f15;
    --p1: #3f8ae0; --p2: #1d9270; --p3: #b97708; --p4: #8e6bd0; --p5: #bf5682; --p6: #727d8a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 6px; }
h3 { font-size: 14px; margin: 18px 0 2px; color: var(--soft); font-weight: 600; overflow-wrap: anywhere; }
p { margin: 4px 0 10px; max-width: 75ch; }
.soft, figcaption { color: var(--soft); }
.badge { display: inline-block; padding: 2px 11px; border-radius: 99px; font-weight: 650; margin: 0 8px 10px 0; }
.good { color: var(--good); background: var(--goodback); }
.bad { color: var(--bad); background: var(--badback); }
.open { color: var(--open); background: var(--openback); }
.plain { color: var(--soft); background: var(--band); }
.notice { border-left: 4px solid var(--open); background: var(--openback); padding: 8px 14px; border-radius: 4px; }
.notice ul, section > ul { margin: 4px 0; padding-left: 20px; }
li { overflow-wrap: anywhere; max-width: 90ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: anywhere; }
table.facts th { width: 170px; font-weight: 500; }
table.grid td, table.grid th { padding-right: 16px; overflow-wrap: normal; }
td.number, th.number { text-align: right; white-space: nowrap; }
table.matrix td { border: 3px solid var(--page); border-radius: 6px; padding: 6px 10px; min-width: 120px; }
table.matrix td small { display: block; opacity: .85; }
code { font: 13px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
figure { margin: 6px 0 14px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px 8px; }
details { margin: 10px 0; } summary { cursor: pointer; font-weight: 600; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg text { fill: var(--ink); } svg .tick { fill: var(--soft); font-size: 11px; }
svg .value { font-weight: 600; } svg .inside { fill: var(--oninside); font-size: 11px; }
svg .grid { stroke: var(--grid); } svg .zero { stroke: var(--soft); } svg .band { fill: var(--band); }
svg .bar { stroke: var(--bad); stroke-dasharray: 4 3; } svg .interval { fill: var(--interval); }
svg .estimate { stroke: var(--candidate); stroke-width: 2; }
svg circle.candidate { fill: var(--candidate); } svg circle.base { fill: var(--base); }
svg circle { stroke: var(--card); stroke-width: 1.5; }
svg circle.hollow { fill: var(--card); stroke: var(--candidate); } svg circle.faint { fill-opacity: .55; stroke: none; }
svg line.mean { stroke-width: 2.5; } svg line.mean.base { stroke: var(--base); }
svg line.mean.candidate { stroke: var(--candidate); }
svg .whisker { stroke-width: 3; stroke-linecap: round; }
svg circle.better { fill: var(--good); } svg line.better { stroke: var(--good); }
svg circle.worse { fill: var(--bad); } svg line.worse { stroke: var(--bad); }
svg circle.same { fill: var(--candidate); } svg line.same { stroke: var(--candidate); }
svg circle.unclear { fill: var(--open); } svg line.unclear { stroke: var(--open); }
svg .p1 { fill: var(--p1); } svg .p2 { fill: var(--p2); } svg .p3 { fill: var(--p3); }
svg .p4 { fill: var(--p4); } svg .p5 { fill: var(--p5); } svg .p6 { fill: var(--p6); }
@media (max-width: 640px) { table.facts th { width: 110px; } main { padding: 18px 12px 40px; }
  figure { overflow-x: auto; } svg { min-width: 640px; } }
@media print { body { background: #fff; } details { display: block; } }
"""
