/* The functions of Surrogate.java:   cc -shared -fPIC -I$JAVA_HOME/include -I$JAVA_HOME/include/linux surrogate_jni.c
 * -llockstep_train -o libsurrogate_jni.so && lockstep run -n 2 -- java -Djava.library.path=. Surrogate.java */
#include <jni.h>
#include <lockstep/train_c.h>
#include <stdint.h>

static void check(JNIEnv* env, lockstep_status status) {
  if (status != LOCKSTEP_OK)
    (*env)->ThrowNew(env, (*env)->FindClass(env, "java/lang/IllegalStateException"), lockstep_train_last_error());
}

static lockstep_train_world* world_of(jlong handle) { return (lockstep_train_world*)(intptr_t)handle; }
static lockstep_train_model* model_of(jlong handle) { return (lockstep_train_model*)(intptr_t)handle; }

JNIEXPORT jlong JNICALL Java_Surrogate_join(JNIEnv* env, jclass type) {
  lockstep_train_world* world = NULL;
  (void)type;
  check(env, lockstep_train_join(NULL, &world));
  return (jlong)(intptr_t)world;
}

JNIEXPORT void JNICALL Java_Surrogate_leave(JNIEnv* env, jclass type, jlong world) {
  (void)type;
  check(env, lockstep_train_leave(world_of(world)));
}

JNIEXPORT jint JNICALL Java_Surrogate_rank(JNIEnv* env, jclass type, jlong world) {
  (void)env;
  (void)type;
  return lockstep_train_rank(world_of(world));
}

JNIEXPORT jint JNICALL Java_Surrogate_size(JNIEnv* env, jclass type, jlong world) {
  (void)env;
  (void)type;
  return lockstep_train_size(world_of(world));
}

JNIEXPORT jlong JNICALL Java_Surrogate_create(JNIEnv* env, jclass type, jlong world, jstring file, jstring settings) {
  lockstep_train_model* model = NULL;
  const char* const path = (*env)->GetStringUTFChars(env, file, NULL);
  const char* const text = (*env)->GetStringUTFChars(env, settings, NULL);
  (void)type;
  check(env, lockstep_train_create(world_of(world), path, text, &model));
  (*env)->ReleaseStringUTFChars(env, file, path);
  (*env)->ReleaseStringUTFChars(env, settings, text);
  return (jlong)(intptr_t)model;
}

/* Trains on, or with learn == 0 infers, rows of `inputs` [rows, 3] and `outputs` [rows, 1]. */
JNIEXPORT jdouble JNICALL Java_Surrogate_call(JNIEnv* env, jclass type, jlong model, jdoubleArray inputs,
                                              jdoubleArray outputs, jboolean learn) {
  const int64_t rows = (*env)->GetArrayLength(env, outputs), in_shape[] = {rows, 3}, out_shape[] = {rows, 1};
  double loss = 0, *const in = (*env)->GetDoubleArrayElements(env, inputs, NULL);
  double* const out = (*env)->GetDoubleArrayElements(env, outputs, NULL);
  const lockstep_train_array input = {in, in_shape, 2, LOCKSTEP_FLOAT64}, output = {out, out_shape, 2, LOCKSTEP_FLOAT64};
  const lockstep_status status = learn ? lockstep_train_step(model_of(model), &input, 1, &output, 1, &loss)
                                       : lockstep_train_infer(model_of(model), &input, 1, &output, 1);
  (void)type;
  (*env)->ReleaseDoubleArrayElements(env, inputs, in, JNI_ABORT);
  (*env)->ReleaseDoubleArrayElements(env, outputs, out, learn ? JNI_ABORT : 0);
  check(env, status);
  return loss;
}
