//! The choice among candidates.

/// The candidate to take, by its cost: the lowest, the first of equals, if `temperature` is 0; otherwise
/// drawn by [`probabilities`], where `uniform` is a number of `[0, 1)` that the caller draws. `None` if
/// there is none. Costs that are no numbers are never taken while others are there.
#[must_use]
pub fn pick(costs: &[f64], temperature: f64, uniform: f64) -> Option<usize> {
    let cheapest = cheapest(costs)?;
    if temperature <= 0.0 {
        return Some(cheapest);
    }
    let mut left = uniform;
    let mut last = None;
    for (candidate, probability) in probabilities(costs, temperature).into_iter().enumerate() {
        if probability > 0.0 {
            last = Some(candidate);
        }
        left -= probability;
        if left < 0.0 {
            return Some(candidate);
        }
    }
    // What rounding has left over is the last one's that could be drawn.
    last.or(Some(cheapest))
}

/// How likely each candidate is to be taken:
/// `exp(-(cost - least) / ((greatest - least) temperature))`, as shares of their sum. Equal costs are
/// equally likely; with a temperature of 0 it is the first of the cheapest, always.
#[must_use]
pub fn probabilities(costs: &[f64], temperature: f64) -> Vec<f64> {
    let Some(cheapest) = cheapest(costs) else { return Vec::new() };
    if temperature <= 0.0 {
        return (0..costs.len()).map(|at| if at == cheapest { 1.0 } else { 0.0 }).collect();
    }
    let finite = || costs.iter().copied().filter(|cost| cost.is_finite());
    let least = finite().fold(f64::INFINITY, f64::min);
    let greatest = finite().fold(f64::NEG_INFINITY, f64::max);
    let range = greatest - least;
    let weight = |cost: &f64| match cost.is_finite() {
        true if range > 0.0 => (-(cost - least) / (range * temperature)).exp(),
        true => 1.0,
        false => 0.0,
    };
    let weights: Vec<f64> = costs.iter().map(weight).collect();
    let sum: f64 = weights.iter().sum();
    if sum > 0.0 {
        weights.into_iter().map(|weight| weight / sum).collect()
    } else {
        probabilities(costs, 0.0)
    }
}

/// The first of the lowest costs.
fn cheapest(costs: &[f64]) -> Option<usize> {
    let key = |cost: f64| if cost.is_nan() { f64::INFINITY } else { cost };
    let ranked = costs.iter().copied().map(key).enumerate();
    ranked.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(at, _)| at)
}
