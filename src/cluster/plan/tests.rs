//! Prefixes that grow by what others say, true or not.

use kvstrata_tiers::tier::Tier;
use proptest::prelude::*;

use super::*;

const OWN: u32 = 0;

fn found(start: u32, end: u32, tier: Tier, holder: u32) -> Found {
    let bytes = u64::from(end.saturating_sub(start)) * 64;
    let run = Run { start, end, tier, pending: false, bytes };
    Found { run, holder, est_load: Duration::from_millis(bytes) }
}

fn sees(member: u32, blocks: u32) -> Sighting {
    Sighting { member, blocks: Some(blocks), can_answer: true }
}

#[test]
fn those_with_the_longest_runs_are_asked_and_no_more_than_so_many() {
    let prefix = Prefix::new(100_000, vec![found(0, 10, Tier::Dram, OWN)]);
    let unknown = Sighting { blocks: None, ..sees(9, 0) };
    let away = Sighting { can_answer: false, ..sees(8, 90) };
    let sightings =
        [unknown, away, sees(1, 0), sees(2, 5), sees(3, 20), sees(4, 5), sees(5, 4096), sees(6, 1)];
    let questions = prefix.questions(&sightings);
    let asked: Vec<_> = questions.iter().map(|q| (q.member, q.start, q.end)).collect();
    assert_eq!(asked, [(5, 10, 100_000), (3, 10, 286), (2, 10, 271), (4, 10, 271)]);
    assert!(prefix.is_partial(&sightings[..1]) && prefix.is_partial(&sightings[1..2]));
    assert!(!prefix.is_partial(&sightings[2..3]), "a filter that lacks it is sure");
    let whole = Prefix::new(10, vec![found(0, 10, Tier::Nvme, OWN)]);
    assert!(whole.is_whole() && !whole.is_partial(&sightings));
}

#[test]
fn the_longest_answer_is_taken_then_what_is_here_and_then_others_are_asked() {
    let mut prefix = Prefix::new(100, vec![found(0, 10, Tier::Dram, OWN)]);
    let sightings = [sees(1, 20), sees(2, 30), sees(3, 3)];
    let questions = prefix.questions(&sightings);
    assert_eq!(questions.len(), 3);
    let answers = questions.into_iter().map(|question| {
        let answer = match question.member {
            1 => vec![found(10, 20, Tier::Dram, 7), found(20, 30, Tier::Nvme, 7)],
            2 => vec![found(10, 40, Tier::Object, 7)],
            _ => vec![],
        };
        (question, Some(answer))
    });
    assert_eq!(prefix.take(answers.collect()), 30);
    prefix.extend([found(40, 45, Tier::Nvme, OWN)]);
    assert_eq!((prefix.end(), prefix.readable(), prefix.blocks_of_others(OWN)), (45, 45, 30));
    let holders: Vec<_> = prefix.runs().iter().map(|found| found.holder).collect();
    assert_eq!(holders, [OWN, 2, OWN], "named by who was asked, whatever it says");
    assert_eq!(prefix.counts().to_array(), [10, 5, 30, 0, 55]);
    // At the next block all may be asked again: what they lacked was another one.
    let questions = prefix.questions(&[sees(1, 1), sees(2, 0), sees(3, 1)]);
    assert_eq!(questions.iter().map(|q| q.member).collect::<Vec<_>>(), [1, 3]);
    let question = questions[0];
    assert_eq!(prefix.take(vec![(question, Some(vec![]))]), 0);
    assert!(!prefix.is_partial(&[sees(1, 1)]), "it has said that it lacks it");
    assert!(prefix.questions(&[sees(1, 1)]).is_empty());
    assert!(prefix.is_partial(&[sees(3, 1)]), "this one has not");
}

#[test]
fn of_equals_the_one_that_loads_sooner_is_taken() {
    let mut prefix = Prefix::new(10, vec![]);
    let questions = prefix.questions(&[sees(1, 10), sees(2, 10)]);
    let slow = Found { est_load: Duration::from_secs(1), ..found(0, 10, Tier::Object, 1) };
    let quick = found(0, 10, Tier::Dram, 2);
    prefix.take(vec![(questions[0], Some(vec![slow])), (questions[1], Some(vec![quick]))]);
    assert_eq!(prefix.runs(), [quick]);
}

#[test]
fn who_does_not_answer_leaves_the_lookup_partial_and_is_not_asked_again() {
    let own = vec![found(0, 10, Tier::Dram, OWN)];
    let mut prefix = Prefix::new(20, own.clone());
    let sightings = [sees(1, 10)];
    let questions = prefix.questions(&sightings);
    assert_eq!(prefix.take(vec![(questions[0], None)]), 0);
    assert_eq!(prefix.runs(), own, "what is here stays");
    assert!(prefix.is_partial(&sightings) && prefix.questions(&sightings).is_empty());
    assert!(!prefix.is_partial(&[]), "a member that has left has nothing");
}

#[test]
fn a_put_that_is_in_flight_here_ends_what_is_readable_and_one_there_is_not_taken() {
    let mut pending = found(4, 6, Tier::Dram, OWN);
    pending.run.pending = true;
    let mut prefix = Prefix::new(20, vec![found(0, 4, Tier::Dram, OWN), pending]);
    let question = Question { member: 1, start: 6, end: 20 };
    let mut there = found(10, 20, Tier::Dram, 1);
    there.run.pending = true;
    assert_eq!(prefix.take(vec![(question, Some(vec![found(6, 10, Tier::Dram, 1), there]))]), 4);
    assert_eq!((prefix.readable(), prefix.end()), (4, 10));
    assert_eq!(prefix.counts().to_array(), [8, 0, 0, 2, 10]);
}

fn any_found() -> impl Strategy<Value = Found> {
    let number = || prop_oneof![0..40_u32, any::<u32>()];
    (number(), number(), 0..3_usize, any::<bool>()).prop_map(|(start, end, tier, pending)| {
        let mut found = found(start, end, Tier::ALL[tier], 99);
        found.run.pending = pending;
        found
    })
}

/// Members that have some blocks each, of which the filter of some has more.
fn any_members() -> impl Strategy<Value = Vec<Vec<bool>>> {
    prop::collection::vec(prop::collection::vec(any::<bool>(), 40), 1..7)
}

/// What a member has from `start` on.
fn runs_of(has: &[bool], start: u32, end: u32, holder: u32) -> Vec<Found> {
    let had = (start..end).take_while(|at| has[*at as usize]);
    had.map(|at| found(at, at + 1, Tier::ALL[at as usize % 3], holder)).collect()
}

proptest! {
    #[test]
    fn nothing_that_is_said_makes_a_prefix_wrong(
        asked in 0..40_u32, own in prop::collection::vec(any_found(), 0..4),
        answers in prop::collection::vec(prop::option::of(prop::collection::vec(any_found(), 0..6)), 0..6),
    ) {
        let mut prefix = Prefix::new(asked, own);
        let start = prefix.end();
        let said = answers.clone();
        let answers = (1..).zip(answers).map(|(member, answer)| {
            (Question { member, start, end: asked }, answer)
        });
        prefix.take(answers.collect());
        let mut end = 0;
        for found in prefix.runs() {
            prop_assert!(found.run.start == end && found.run.end > end);
            end = found.run.end;
            if found.run.start >= start {
                let of = said[found.holder as usize - 1].as_ref().unwrap();
                prop_assert!(of.iter().any(|told| told.run == found.run));
            }
        }
        prop_assert!(end <= asked);
        prop_assert_eq!(prefix.counts().to_array().iter().sum::<u32>(), asked);
        prop_assert!(prefix.readable() <= end);
    }

    /// With answers from all that may have the next block, nothing is overlooked but for the rounds; a member
    /// that is lost takes only what it alone had.
    #[test]
    fn rounds_find_what_there_is_and_a_lost_member_takes_only_its_own(
        members in any_members(), lost in 0..7_usize,
    ) {
        let asked = 40;
        let mut prefix = Prefix::new(asked, runs_of(&members[0], 0, asked, OWN));
        let is_lost = |member: usize| member > 0 && member == lost;
        let mut sightings = Vec::new();
        for _ in 0..200 {
            let end = prefix.end();
            sightings = (1..members.len()).map(|member| {
                let blocks = u32::try_from(runs_of(&members[member], end, asked, 0).len()).unwrap();
                Sighting { member: u32::try_from(member).unwrap(), blocks: Some(blocks), can_answer: true }
            }).collect();
            let questions = prefix.questions(&sightings);
            if questions.is_empty() {
                break;
            }
            let answer = |question: Question| {
                let member = question.member as usize;
                let runs = runs_of(&members[member], question.start, question.end, question.member);
                (question, (!is_lost(member)).then_some(runs))
            };
            prefix.take(questions.into_iter().map(answer).collect());
            prefix.extend(runs_of(&members[0], prefix.end(), asked, OWN));
        }
        for found in prefix.runs() {
            let has = &members[found.holder as usize];
            prop_assert!((found.run.start..found.run.end).all(|at| has[at as usize]));
            prop_assert!(!is_lost(found.holder as usize));
        }
        let left = |at: u32| members.iter().enumerate().any(|(m, has)| !is_lost(m) && has[at as usize]);
        let expected = u32::try_from((0..asked).take_while(|at| left(*at)).count()).unwrap();
        prop_assert_eq!(prefix.end(), expected);
        let of_lost = expected < asked
            && members.get(lost).is_some_and(|has| lost > 0 && has[expected as usize]);
        prop_assert_eq!(prefix.is_partial(&sightings), of_lost);
    }
}
