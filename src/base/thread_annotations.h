#pragma once

// Annotations for Clang's thread-safety analysis, which name the mutex that guards a variable. scripts/thread_safety
// (make lint) runs the analysis; for other compilers the macros are empty. Use them with lockstep::Mutex
// (base/mutex.h): the standard library's mutexes are not annotated.

#if defined(__clang__)
#define LOCKSTEP_THREAD_ANNOTATION(what) __attribute__((what))
#else
#define LOCKSTEP_THREAD_ANNOTATION(what)
#endif

/// On a variable: it may be used only while the mutex is held.
#define LOCKSTEP_GUARDED_BY(mutex) LOCKSTEP_THREAD_ANNOTATION(guarded_by(mutex))
/// On a pointer: the same of what it points to.
#define LOCKSTEP_PT_GUARDED_BY(mutex) LOCKSTEP_THREAD_ANNOTATION(pt_guarded_by(mutex))

/// On a function: the caller holds the mutex, before and after.
#define LOCKSTEP_REQUIRES(...) LOCKSTEP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
/// On a function: it acquires or releases the mutex, or without an argument the object's own.
#define LOCKSTEP_ACQUIRE(...) LOCKSTEP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define LOCKSTEP_RELEASE(...) LOCKSTEP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
/// On a function that returns a bool: it has acquired the mutex if it returns `success`.
#define LOCKSTEP_TRY_ACQUIRE(success, ...) LOCKSTEP_THREAD_ANNOTATION(try_acquire_capability(success, ##__VA_ARGS__))
/// On a function that is not analysed. The reason is given next to it.
#define LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS LOCKSTEP_THREAD_ANNOTATION(no_thread_safety_analysis)

/// On a class: a mutex, or an object that holds one for its lifetime.
#define LOCKSTEP_CAPABILITY(name) LOCKSTEP_THREAD_ANNOTATION(capability(name))
#define LOCKSTEP_SCOPED_CAPABILITY LOCKSTEP_THREAD_ANNOTATION(scoped_lockable)
