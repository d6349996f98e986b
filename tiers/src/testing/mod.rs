//! Doubles and the conformance suite of colder tiers.
