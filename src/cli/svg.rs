//! What charts have in common: colours, letters, an area to draw on, a file to write.

use std::{fs, path::Path};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use plotters::{
    coord::Shift,
    drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea},
    prelude::SVGBackend,
    style::{
        IntoFont, RGBColor, TextStyle, WHITE,
        text_anchor::{HPos, Pos, VPos},
    },
};

pub(super) const FONT: &str = "sans-serif";
pub(super) const INK: RGBColor = RGBColor(40, 44, 52);
pub(super) const FAINT: RGBColor = RGBColor(225, 228, 232);
/// Told apart also without red or green sight (Okabe and Ito).
pub(super) const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(86, 90, 98),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
];
pub(super) const MISS: RGBColor = RGBColor(200, 204, 210);

pub(super) type Failed = Box<dyn std::error::Error + Send + Sync>;
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(super) fn save(path: &Path, svg: &str) -> Result<()> {
    fs::write(path, svg)
        .map_err(|source| Error::invalid(format!("write chart {}", path.display())).because(source))
}

/// Draws on a white area of `size` pixels and returns the SVG.
pub(super) fn draw(
    size: (u32, u32),
    on: impl FnOnce(&Area<'_>) -> std::result::Result<(), Failed>,
) -> Result<String> {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)
            .map_err(failed)
            .and_then(|()| on(&area))
            .and_then(|()| area.present().map_err(failed))
    };
    drawn.map_err(|source| Error::new(ErrorKind::Internal, "draw a chart").because(source))?;
    Ok(svg)
}

#[expect(clippy::needless_pass_by_value, reason = "so that it fits map_err")]
pub(super) fn failed<E: std::error::Error + Send + Sync>(error: DrawingAreaErrorKind<E>) -> Failed {
    error.to_string().into()
}

/// The style of a text that ends or starts at its position.
pub(super) fn label_style<'a>(color: &'a RGBColor, side: HPos) -> TextStyle<'a> {
    (FONT, 15).into_font().color(color).pos(Pos::new(side, VPos::Center))
}

/// A number for an axis: no more digits than it needs.
pub(super) fn number(value: f64) -> String {
    let digits: usize = if value.abs() >= 100.0 { 0 } else { 2 };
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_numbers_are_short() {
        for (value, text) in
            [(0.5, "0.5"), (10.0, "10"), (0.0, "0"), (1234.4, "1234"), (100.0, "100")]
        {
            assert_eq!(number(value), text);
        }
    }
}
