//! Sums over ranks from Rust, without a crate:   rustc -O sums.rs && lockstep run -n 2 -- ./sums
use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr::{null, null_mut};

#[link(name = "lockstep_c")]
extern "C" {
    fn lockstep_join(options: *const c_void, world: *mut *mut c_void) -> i32;
    fn lockstep_leave(group: *mut c_void) -> i32;
    fn lockstep_rank(group: *const c_void) -> c_int;
    fn lockstep_size(group: *const c_void) -> c_int;
    fn lockstep_last_error() -> *const c_char;
    fn lockstep_all_reduce(
        group: *mut c_void, input: *const c_void, output: *mut c_void, count: i64, dtype: i32, op: i32,
        request: *mut *mut c_void,
    ) -> i32;
}
const FLOAT32: i32 = 0;
const SUM: i32 = 0;

fn checked(status: i32) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(lockstep_last_error()) }.to_string_lossy().into_owned())
}

/// All ranks; left when it is dropped.
struct World(*mut c_void);

impl World {
    fn join() -> Result<World, String> {
        let mut world = null_mut();
        checked(unsafe { lockstep_join(null(), &mut world) })?;
        Ok(World(world))
    }
    fn rank(&self) -> i32 {
        unsafe { lockstep_rank(self.0) }
    }
    fn size(&self) -> i32 {
        unsafe { lockstep_size(self.0) }
    }
    /// Replaces the values by their sums over all ranks.
    fn all_reduce(&self, values: &mut [f32]) -> Result<(), String> {
        let data = values.as_mut_ptr().cast::<c_void>();
        checked(unsafe { lockstep_all_reduce(self.0, data, data, values.len() as i64, FLOAT32, SUM, null_mut()) })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        unsafe { lockstep_leave(self.0) };
    }
}

fn main() -> Result<(), String> {
    let world = World::join()?;
    let mut state = world.rank() as u32;
    let mut values = vec![0f32; 1000];
    for value in &mut values {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        *value = (state >> 8) as f32 / 16777216.0 - 0.5;
    }
    world.all_reduce(&mut values)?;
    let hash = values.iter().fold(2166136261u32, |hash, value| (hash ^ value.to_bits()).wrapping_mul(16777619));
    if world.rank() == 0 {
        println!("sums {:08x} over {} ranks", hash, world.size());
    }
    Ok(())
}
