//! Charts of a report, as SVG: traces side by side.

use std::{fs, path::Path};

use kvstrata_tiers::error::{Error, Result};
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    coord::combinators::IntoLogRange,
    element::{Circle, PathElement, Rectangle},
    series::LineSeries,
    style::{Color, IntoFont, RGBColor, ShapeStyle, WHITE, text_anchor::HPos},
};

use super::report::{Load, Report, Row, TraceReport};
use crate::cli::svg::{
    Area, COLORS, FAINT, FONT, Failed, INK, MISS, draw, failed, label_style, number, save,
};

/// Pixels of one panel.
const PANEL: (u32, u32) = (620, 400);
/// Pixels of a bar with its gap, and of what is around the bars.
const BAR: u32 = 24;
const AROUND_BARS: u32 = 130;

/// Writes the charts of `report` into `folder`.
///
/// # Errors
/// `Invalid` if a file cannot be written.
pub(super) fn write(report: &Report, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)
        .map_err(|source| Error::invalid(format!("create {}", folder.display())).because(source))?;
    let columns = report.traces.len();
    let width = PANEL.0.saturating_mul(u32::try_from(columns).unwrap_or(u32::MAX));
    let first_token = draw((width, 2 * PANEL.1), |area| {
        let panels = area.split_evenly((2, columns));
        let measures: [Measure; 2] = [("mean", |row| row.mean_ms), ("p99", |row| row.p99_ms)];
        let wanted =
            measures.iter().flat_map(|measure| report.traces.iter().map(move |t| (measure, t)));
        panels
            .iter()
            .zip(wanted)
            .try_for_each(|(panel, (measure, trace))| times(trace, *measure, panel))
    })?;
    save(&folder.join("first-token.svg"), &first_token)?;
    let bars = report.traces.iter().map(|trace| rows(trace).count()).max().unwrap_or(0);
    let height = BAR.saturating_mul(u32::try_from(bars).unwrap_or(u32::MAX)) + AROUND_BARS;
    let split = draw((width, height), |area| {
        let panels = area.split_evenly((1, columns));
        panels.iter().zip(&report.traces).try_for_each(|(panel, trace)| sources(trace, panel))
    })?;
    save(&folder.join("sources.svg"), &split)
}

/// A name, and what it is of a row, in ms.
type Measure = (&'static str, fn(&Row) -> f64);

/// All rows with their loads, in the order of the tables.
fn rows(trace: &TraceReport) -> impl DoubleEndedIterator<Item = (&Load, &Row)> {
    trace.loads.iter().flat_map(|load| load.rows.iter().map(move |row| (load, row)))
}

/// Times to the first token against the speed, a line for each mode.
fn times(
    trace: &TraceReport,
    (name, measure): Measure,
    area: &Area<'_>,
) -> std::result::Result<(), Failed> {
    let seconds = |row: &Row| (measure(row) / 1000.0).max(1e-3);
    let all = || rows(trace).map(|(_, row)| seconds(row));
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(1e-3, f64::max));
    let loads = (0..trace.loads.len()).fold(0.0, |loads, _| loads + 1.0);
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Time to the first token, {name}: {}", trace.trace),
            (FONT, 17).into_font().color(&INK),
        )
        .margin(14)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.25..loads - 0.75, (low * 0.8..high * 1.3).log_scale())
        .map_err(failed)?;
    let speed = |x: &f64| {
        let at = (0..).zip(&trace.loads).find(|(at, _)| (f64::from(*at) - x).abs() < 1e-6);
        at.map_or(String::new(), |(_, load)| format!("x{}", load.speedup))
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc("Speed of the trace")
        .y_desc("s (log scale)")
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .label_style((FONT, 13).into_font().color(&INK))
        .x_labels(trace.loads.len().saturating_mul(4))
        .x_label_formatter(&speed)
        .y_label_formatter(&|y| number(*y))
        .draw()
        .map_err(failed)?;
    let modes = trace.loads.first().map_or(&[][..], |load| &load.rows);
    for ((at, mode), color) in modes.iter().enumerate().zip(COLORS.iter().cycle()) {
        let points = (0..)
            .zip(&trace.loads)
            .filter_map(|(x, load)| Some((f64::from(x), seconds(load.rows.get(at)?))));
        let points: Vec<(f64, f64)> = points.collect();
        let style = ShapeStyle::from(color).stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))
            .map_err(failed)?
            .label(mode.mode)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        let dots = points.iter().map(|point| Circle::new(*point, 4, color.filled()));
        chart.draw_series(dots).map_err(failed)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(FAINT)
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()
        .map_err(failed)
}

/// The colour of each source of blocks.
fn color(source: &str) -> RGBColor {
    let [blue, orange, green, _, _, purple] = COLORS;
    match source {
        "device" => green,
        "dram" => blue,
        "nvme" => orange,
        "object" => purple,
        _ => MISS,
    }
}

/// Where the blocks of prompts came from, a bar for each mode at each speed.
fn sources(trace: &TraceReport, area: &Area<'_>) -> std::result::Result<(), Failed> {
    let count = rows(trace).fold(0.0, |count, _| count + 1.0);
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Where blocks came from: {}", trace.trace),
            (FONT, 17).into_font().color(&INK),
        )
        .margin(14)
        .margin_bottom(36)
        .x_label_area_size(48)
        .y_label_area_size(140)
        .build_cartesian_2d(0.0..100.0, 0.0..count)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc("Share of the blocks of all prompts, %")
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .label_style((FONT, 13).into_font().color(&INK))
        .x_label_formatter(&|x| number(*x))
        .draw()
        .map_err(failed)?;
    // Where this panel is in the whole.
    let panel = area.get_pixel_range();
    let mut top = count;
    for (load, row) in rows(trace) {
        let (center, mut left) = (top - 0.5, 0.0);
        for (source, share) in row.split() {
            let right = left + 100.0 * share;
            let corners = [(left, center - 0.38), (right, center + 0.38)];
            chart.draw_series([Rectangle::new(corners, color(source).filled())]).map_err(failed)?;
            left = right;
        }
        let (x, y) = chart.backend_coord(&(0.0, center));
        let (x, y) = (x - panel.0.start, y - panel.1.start);
        let name = format!("x{} {}", load.speedup, row.mode);
        area.draw_text(&name, &label_style(&INK, HPos::Right), (x - 8, y)).map_err(failed)?;
        top -= 1.0;
    }
    legend(area, trace)
}

/// Names the colours, below the bars.
fn legend(area: &Area<'_>, trace: &TraceReport) -> std::result::Result<(), Failed> {
    let Some((_, row)) = rows(trace).next() else { return Ok(()) };
    let (_, height) = area.dim_in_pixel();
    let y = i32::try_from(height).unwrap_or(i32::MAX) - 16;
    let mut x = 150;
    for (source, _) in row.split() {
        let mark = Rectangle::new([(x, y - 6), (x + 12, y + 6)], color(source).filled());
        area.draw(&mark).map_err(failed)?;
        area.draw_text(source, &label_style(&INK, HPos::Left), (x + 18, y)).map_err(failed)?;
        x += 92;
    }
    Ok(())
}
