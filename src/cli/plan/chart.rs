//! Charts of a report, as SVG.

use std::{fs, path::Path};

use kvstrata_tiers::error::{Error, Result};
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    coord::combinators::{BindKeyPoints, IntoLogRange},
    element::{Circle, PathElement, Rectangle, Text},
    series::{DashedLineSeries, LineSeries},
    style::{Color, IntoFont, RGBColor, ShapeStyle, WHITE, text_anchor::HPos},
};

use super::report::{Report, Row};
use crate::{
    cli::svg::{
        Area, COLORS, FAINT, FONT, Failed, INK, MISS, draw, failed, label_style, number, save,
    },
    numbers::count,
    sim::ratio,
};

/// Pixels of a chart.
const SIZE: (u32, u32) = (960, 560);
const SIZE_TIERS: (u32, u32) = (960, 320);

/// Writes the charts of `report` into the folder `path`, or to the file if it ends in `.svg`.
///
/// # Errors
/// `Invalid` if a file cannot be written.
pub(super) fn write(report: &Report, path: &Path) -> Result<()> {
    let is_file = path.extension().is_some_and(|extension| extension == "svg");
    let (hits, tiers) = if is_file {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        (path.to_owned(), path.with_file_name(format!("{stem}-tiers.svg")))
    } else {
        fs::create_dir_all(path).map_err(|source| {
            Error::invalid(format!("create {}", path.display())).because(source)
        })?;
        (path.join("hit-ratio.svg"), path.join("tier-split.svg"))
    };
    save(&hits, &draw(SIZE, |area| hit_ratio(report, area))?)?;
    if !report.tiers.is_empty() {
        save(&tiers, &draw(SIZE_TIERS, |area| tier_split(report, area))?)?;
    }
    Ok(())
}

/// Hit ratio against capacity, a line for each policy.
fn hit_ratio(report: &Report, area: &Area<'_>) -> std::result::Result<(), Failed> {
    let scale = Scale::of(report);
    let (low, high) = scale.range();
    let top = 100.0 * ratio(report.unbounded_hits, report.references);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Prefix hit ratio, {}", report.trace), (FONT, 22).into_font().color(&INK))
        .margin(18)
        .x_label_area_size(56)
        .y_label_area_size(72)
        .build_cartesian_2d(
            (low..high).log_scale().with_key_points(scale.ticks()),
            0.0..ceiling(top),
        )
        .map_err(failed)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc(Scale::title(report))
        .y_desc("Hit ratio, % of block references")
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style((FONT, 14).into_font().color(&INK))
        .x_label_formatter(&|x| number(*x))
        .y_label_formatter(&|y| number(*y))
        .draw()
        .map_err(failed)?;
    chart
        .draw_series(DashedLineSeries::new(
            [(low, top), (high, top)],
            6,
            4,
            ShapeStyle::from(&INK).stroke_width(1),
        ))
        .map_err(failed)?
        .label(format!("unlimited, {top:.1} %"))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], INK));
    for (policy, color) in report.policies.iter().zip(COLORS.iter().cycle()) {
        let points = scale.points(policy);
        let style = ShapeStyle::from(color).stroke_width(3);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))
            .map_err(failed)?
            .label(policy.replace("s3", "s3-").to_uppercase())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        let dots = points.iter().map(|point| Circle::new(*point, 4, color.filled()));
        chart.draw_series(dots).map_err(failed)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .margin(16)
        .background_style(WHITE.mix(0.9))
        .border_style(FAINT)
        .label_font((FONT, 15).into_font().color(&INK))
        .draw()
        .map_err(failed)
}

/// The share of references that each tier served, and the misses.
fn tier_split(report: &Report, area: &Area<'_>) -> std::result::Result<(), Failed> {
    let bars = bars(report);
    let rows = (1..=bars.len()).fold(0.0, |rows, _| rows + 1.0);
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Tier split of the hits, {}", report.trace),
            (FONT, 22).into_font().color(&INK),
        )
        .margin(18)
        .x_label_area_size(56)
        .y_label_area_size(170)
        .build_cartesian_2d(0.0..100.0, 0.0..rows)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc("Share of block references, %")
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style((FONT, 15).into_font().color(&INK))
        .x_label_formatter(&|x| number(*x))
        .draw()
        .map_err(failed)?;
    for bar in &bars {
        let corners = [(0.0, bar.center - 0.35), (bar.share, bar.center + 0.35)];
        chart.draw_series([Rectangle::new(corners, bar.color.filled())]).map_err(failed)?;
        let (x, y) = chart.backend_coord(&(0.0, bar.center));
        area.draw_text(&bar.name, &label_style(&INK, HPos::Right), (x - 12, y)).map_err(failed)?;
        // A label that would leave the area goes into the bar.
        let inside = bar.share > 88.0;
        let (x, side, color) = if inside {
            (bar.share - 1.0, HPos::Right, &WHITE)
        } else {
            (bar.share + 1.0, HPos::Left, &INK)
        };
        let text = format!("{:.1} %", bar.share);
        let label = Text::new(text, (x, bar.center), label_style(color, side));
        chart.draw_series([label]).map_err(failed)?;
    }
    Ok(())
}

/// One bar of the tier split.
struct Bar {
    name: String,
    /// Percent of the references.
    share: f64,
    color: RGBColor,
    /// The middle of the bar on the vertical axis; the hottest tier is on top.
    center: f64,
}

fn bars(report: &Report) -> Vec<Bar> {
    let tiers = report.tiers.iter().zip(COLORS.iter().cycle());
    let miss = (report.misses(), report.references);
    let mut bars: Vec<Bar> = tiers
        .map(|(tier, color)| Bar {
            name: format!("{} ({})", tier.tier, tier.capacity),
            share: 100.0 * tier.hit_ratio,
            color: *color,
            center: 0.0,
        })
        .collect();
    let share = 100.0 * ratio(miss.0, miss.1);
    bars.push(Bar { name: "miss".to_owned(), share, color: MISS, center: 0.0 });
    let mut center = 0.5;
    for bar in bars.iter_mut().rev() {
        bar.center = center;
        center += 1.0;
    }
    bars
}

/// The capacities of a report as numbers for an axis.
struct Scale {
    /// (capacity on the axis, policy, hit ratio in percent), by capacity.
    cells: Vec<(f64, &'static str, f64)>,
}

impl Scale {
    #[expect(clippy::cast_precision_loss, reason = "positions on an axis")]
    fn of(report: &Report) -> Self {
        let value = |row: &Row| match row.bytes {
            Some(bytes) => bytes as f64 / (1_u64 << 30) as f64,
            None => 100.0 * ratio(row.blocks.into(), report.blocks_unique.into()),
        };
        let cell = |row: &Row| (value(row), row.policy, 100.0 * row.hit_ratio);
        let mut cells: Vec<_> = report.rows.iter().map(cell).collect();
        cells.sort_by(|left, right| left.0.total_cmp(&right.0));
        Self { cells }
    }

    /// The ends of the axis, with some room beside the outer points.
    fn range(&self) -> (f64, f64) {
        let end = |cell: Option<&(f64, &str, f64)>| cell.map_or(1.0, |cell| cell.0);
        (end(self.cells.first()) * 0.8, end(self.cells.last()) * 1.25)
    }

    fn ticks(&self) -> Vec<f64> {
        let mut ticks: Vec<f64> = self.cells.iter().map(|cell| cell.0).collect();
        ticks.dedup();
        ticks
    }

    fn points(&self, policy: &str) -> Vec<(f64, f64)> {
        let of_policy = self.cells.iter().filter(|cell| cell.1 == policy);
        of_policy.map(|(capacity, _, hits)| (*capacity, *hits)).collect()
    }

    fn title(report: &Report) -> String {
        match (&report.model, report.block_bytes) {
            (Some(model), _) => format!("Capacity, GiB of {model} KV (log scale)"),
            (None, Some(_)) => "Capacity, GiB (log scale)".to_owned(),
            (None, None) => {
                format!(
                    "Capacity, % of {} distinct blocks (log scale)",
                    count(report.blocks_unique.into())
                )
            }
        }
    }
}

/// The top of the axis for a highest value of `top` percent: the next ten.
fn ceiling(top: f64) -> f64 {
    ((top / 10.0).floor() * 10.0 + 10.0).min(100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_of_the_axis_is_the_next_ten() {
        assert_eq!((ceiling(36.6), ceiling(96.3), ceiling(100.0)), (40.0, 100.0, 100.0));
    }
}
