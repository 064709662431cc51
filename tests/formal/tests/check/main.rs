//! The design holds, each mutation of it is found out, and so is each assumption.

#![expect(
    clippy::print_stdout,
    reason = "what was searched, and the way to a violation"
)]

mod assumptions;
mod design;
mod mutations;

use std::time::Instant;

use fencepost_formal::World;

/// Goes through the whole world: nothing is broken, and all of `happened` did happen.
fn holds(world: World, happened: &[&str]) {
    let start = Instant::now();
    println!("{world:?}");
    let findings = world.explore();
    println!("{} states in {:.1?}", findings.states, start.elapsed());
    for (property, how) in &findings.broken {
        println!("\nbroken: {property}\n{how}");
    }
    assert!(findings.broken.is_empty(), "the rule is broken: see above");
    for name in happened {
        assert!(findings.happened.contains(name), "never happened: {name}");
    }
}

/// Finds each of the properties broken, and says how.
fn breaks(world: &World, properties: &[&'static str]) {
    println!("{world:?}");
    for property in properties {
        let findings = world.clone().explore_until(property);
        let how = findings.broken.get(property);
        let how = how.unwrap_or_else(|| panic!("not found broken: {property}"));
        println!(
            "\nbroken: {property}, after {} states\n{how}",
            findings.states
        );
    }
}
