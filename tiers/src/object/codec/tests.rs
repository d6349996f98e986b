//! Every block comes back from every coding, and what is damaged stays within its bounds.

use super::*;
use crate::testing::Draws;

/// Floats as a cache has them: few exponents, mantissas of noise.
fn floats(bytes: usize, seed: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed);
    let byte = |at: usize| {
        let drawn = draws.draw().to_le_bytes();
        if at.is_multiple_of(2) { drawn[0] } else { 0x3e + drawn[0] % 3 }
    };
    (0..bytes).map(byte).collect()
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed);
    (0..bytes).map(|_| draws.draw().to_le_bytes()[0]).collect()
}

/// Decodes by a decoder that has failed before.
fn back_by(decoder: &mut Decoder, coding: Coding, stored: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut into = vec![0xaa; len];
    assert!(decoder.decode(Coding::Zstd, &[1, 2, 3], &mut into).is_err() || len == 0);
    decoder.decode(coding, stored, &mut into).ok().map(|()| into)
}

fn back(coding: Coding, stored: &[u8], len: usize) -> Result<Vec<u8>, Damage> {
    let mut into = vec![0xaa; len];
    decode(coding, stored, &mut into).map(|()| into)
}

#[test]
fn every_block_comes_back() {
    let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
    let lengths = [0, 1, 2, 3, 100, 4095, 4096, 8191, 8192, 8193, 8194, 16_385, 24_579, 368_640];
    for len in lengths {
        for payload in [floats(len, 1), noise(len, 2), vec![7; len]] {
            for element in [1, 2] {
                let (coding, stored) = encoder.encode(&payload, element);
                assert_eq!(back(coding, stored, len).as_deref(), Ok(&*payload), "{len} {element}");
                let again = back_by(&mut decoder, coding, stored, len);
                assert_eq!(again.as_deref(), Some(&*payload), "{len} {element}");
                let (same, again) = encode(&payload, element);
                assert_eq!((same, &*again), (coding, stored));
            }
        }
    }
}

#[test]
fn the_coding_follows_the_elements_and_what_it_saves() {
    assert_eq!(encode(&floats(65_536, 1), 2).0, Coding::PlanesZstd);
    assert_eq!(encode(&vec![7; 65_536], 1).0, Coding::Zstd);
    for element in [1, 2] {
        let payload = noise(65_536, 3);
        let (coding, stored) = encode(&payload, element);
        assert_eq!((coding, stored.len()), (Coding::Raw, 65_536));
        assert!(matches!(stored, Cow::Borrowed(_)));
    }
    // Half of the bytes as they are, at least 1.6 bits for each of the others.
    let payload = floats(65_536, 1);
    let (_, stored) = encode(&payload, 2);
    assert!((36_864..40_500).contains(&stored.len()), "{}", stored.len());
}

#[test]
fn a_plane_that_is_half_empty_takes_about_half() {
    let mut payload = floats(65_536, 1);
    let (_, full) = encode(&payload, 2);
    let full = full.len();
    payload[32_768..].fill(0);
    // The low plane is stored as it is, in both.
    let (coding, stored) = encode(&payload, 2);
    assert_eq!(coding, Coding::PlanesZstd);
    let saved = full - stored.len();
    assert!(saved * 100 > (full - 32_768) * 40, "{saved} of {full}");
}

#[test]
fn what_saves_less_than_three_percent_is_raw() {
    for (same, coding) in [(2_000, Coding::Raw), (6_000, Coding::Zstd)] {
        let mut payload = noise(100_000, 4);
        payload[..same].fill(0);
        let (found, stored) = encode(&payload, 1);
        assert_eq!(found, coding, "{same}: {}", stored.len());
        assert!(found == Coding::Raw || stored.len() <= 97_000);
    }
}

#[test]
fn other_lengths_are_refused() {
    let payload = floats(10_001, 5);
    let coded = [encode(&payload, 2), encode(&payload, 1), (Coding::Raw, payload[..].into())];
    for (coding, stored) in coded {
        for len in [0, 1, 5000, 5001, 10_000, 10_002, 20_002] {
            assert!(back(coding, &stored, len).is_err(), "{coding:?} as {len}");
        }
        for cut in (0..stored.len()).step_by(97) {
            assert!(back(coding, &stored[..cut], 10_001).is_err(), "{coding:?} cut to {cut}");
        }
        assert!(back(coding, &[&stored, &[1][..]].concat(), 10_001).is_err(), "{coding:?} longer");
    }
}

#[test]
fn a_bomb_writes_no_more_than_there_is_room_for() {
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
    assert!(bomb.len() < 10_000);
    assert_eq!(back(Coding::Zstd, &bomb, 4096), Err(Damage::Misplaced));
    let planes = [&[0; 2048][..], &bomb].concat();
    assert_eq!(back(Coding::PlanesZstd, &planes, 4096), Err(Damage::Misplaced));
}

#[test]
fn numbers_are_those_of_the_format() {
    for (number, coding) in [(1, Coding::Raw), (2, Coding::Zstd), (3, Coding::PlanesZstd)] {
        assert_eq!((Coding::of(number), coding.number()), (Ok(coding), number));
    }
    for number in [0, 4, 255] {
        assert_eq!(Coding::of(number), Err(Damage::Version));
    }
}

#[test]
fn floats_of_16_bits_are_known_by_their_names() {
    for two in ["bf16", "BFloat16", "torch.bfloat16", "fp16", "float16", "torch.half", "f16"] {
        assert_eq!(element_bytes(two), 2, "{two}");
    }
    for one in ["", "u8", "fp8_e4m3", "float32", "torch.float8_e5m2", "int16", "bf16x"] {
        assert_eq!(element_bytes(one), 1, "{one}");
    }
}
