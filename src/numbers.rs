//! Numbers as people read them.

/// Groups digits by three: 1,234,567.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share with two decimals: 36.64 %.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// Microseconds in the unit that fits: 873 us, 12.4 ms, 3.20 s.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub(crate) fn time(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros} us"),
        1_000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        _ => format!("{:.2} s", micros as f64 / 1e6),
    }
}

/// A rate with three decimals, because small blocks make it small.
pub(crate) fn gib_per_s(rate: f64) -> String {
    format!("{rate:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_times_have_units() {
        assert_eq!(
            [count(0), count(999), count(1000), count(1_234_567)],
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!([time(999), time(12_400), time(3_200_000)], ["999 us", "12.4 ms", "3.20 s"]);
        assert_eq!(percent(0.3664), "36.64 %");
    }
}
