//! Closed sets of label values, spelled as they appear in metrics.

pub use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Declares an enum of label values with their spelling.
///
/// A macro because the derived encoding prints the Rust spelling, and writing each such enum by hand
/// is where a spelling and its list drift apart.
#[macro_export]
macro_rules! label_values {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// All values.
            pub const ALL: &'static [Self] = &[$(Self::$value,)+];

            /// The spelling in metrics.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }

        impl $crate::labels::EncodeLabelValue for $name {
            fn encode(
                &self,
                encoder: &mut $crate::labels::LabelValueEncoder<'_>,
            ) -> Result<(), std::fmt::Error> {
                $crate::labels::EncodeLabelValue::encode(&self.name(), encoder)
            }
        }
    };
}
