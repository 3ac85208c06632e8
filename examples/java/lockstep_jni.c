/* The functions of Sums.java:   cc -shared -fPIC -I$JAVA_HOME/include -I$JAVA_HOME/include/linux lockstep_jni.c
 * -llockstep_c -o liblockstep_jni.so && lockstep run -n 2 -- java -Djava.library.path=. Sums.java */
#include <jni.h>
#include <lockstep/c.h>
#include <stdint.h>

static void check(JNIEnv* env, lockstep_status status) {
  if (status != LOCKSTEP_OK)
    (*env)->ThrowNew(env, (*env)->FindClass(env, "java/lang/IllegalStateException"), lockstep_last_error());
}

static lockstep_group* group_of(jlong handle) { return (lockstep_group*)(intptr_t)handle; }

JNIEXPORT jlong JNICALL Java_Sums_join(JNIEnv* env, jclass type) {
  lockstep_group* world = NULL;
  (void)type;
  check(env, lockstep_join(NULL, &world));
  return (jlong)(intptr_t)world;
}

JNIEXPORT void JNICALL Java_Sums_leave(JNIEnv* env, jclass type, jlong group) {
  (void)type;
  check(env, lockstep_leave(group_of(group)));
}

JNIEXPORT jint JNICALL Java_Sums_rank(JNIEnv* env, jclass type, jlong group) {
  (void)env;
  (void)type;
  return lockstep_rank(group_of(group));
}

JNIEXPORT jint JNICALL Java_Sums_size(JNIEnv* env, jclass type, jlong group) {
  (void)env;
  (void)type;
  return lockstep_size(group_of(group));
}

JNIEXPORT void JNICALL Java_Sums_allReduce(JNIEnv* env, jclass type, jlong group, jfloatArray values) {
  const jsize count = (*env)->GetArrayLength(env, values);
  jfloat* data = (*env)->GetFloatArrayElements(env, values, NULL);
  (void)type;
  if (data == NULL) return; /* an OutOfMemoryError has been thrown */
  const lockstep_status status =
      lockstep_all_reduce(group_of(group), data, data, count, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL);
  (*env)->ReleaseFloatArrayElements(env, values, data, 0);
  check(env, status);
}
