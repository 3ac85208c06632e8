#include "reducer/rank_message.h"

#include <utility>

#include "reducer/data_agreement.h"

namespace lockstep {

RankMessage::RankMessage(const ReductionPlan& plan) : plan_(plan), loader_passes_seen_(passes_noted()) {
  facts_.object = plan.settings.object & 255;
}

void RankMessage::set_joining(bool joining, bool divide_by_active) {
  facts_.joining = join_begins_ = joining;
  divide_by_active_ = divide_by_active;
}

void RankMessage::take_over_from(const RankMessage& before) {
  facts_ = before.facts_;
  local_step_ = before.local_step_;
  loader_passes_seen_ = before.loader_passes_seen_;
  divide_by_active_ = before.divide_by_active_;
  reductions_ = before.reductions_;
}

void RankMessage::set_lasting_trouble(std::string trouble) {
  trouble_ = std::move(trouble);
  trouble_lasts_ = true;
}

void RankMessage::note_trouble(const std::string& trouble) {
  if (trouble_.empty()) trouble_ = trouble;
}

void RankMessage::note_trouble(size_t parameter, const std::string& what) {
  if (trouble_.empty()) trouble_ = "parameter " + plan_.names[parameter] + " " + what;
}

void RankMessage::forget_trouble() {
  if (!trouble_lasts_) trouble_.clear();
}

std::string RankMessage::hand_over_trouble() {
  trouble_lasts_ = false;
  return std::exchange(trouble_, "");
}

void RankMessage::prepare(Share share, int passes, bool spoiled, const ReductionEvents& events) {
  facts_.active = share != Share::kOutOfInputs;
  facts_.skipped = share == Share::kSkipped;
  facts_.spoiled = facts_.skipped && spoiled;
  facts_.passes = facts_of_passes(passes);
  facts_.late = facts_.idle = false;
  facts_.local_step = !local_step_.empty();
  loader_passes_ = passes_since(loader_passes_seen_);
  facts_.data = hash_of(loader_passes_);
  facts_.odd_shard = reads_of_another(loader_passes_, plan_.group);
  if (facts_.active) {
    // An edit explains all other findings.
    if (std::string edit = events.inspect(); !edit.empty()) trouble_ = std::move(edit);
  }
  if (events.settings) facts_.settings = events.settings().told(reductions_);
}

void RankMessage::write_row(const at::Tensor& table) {
  facts_.trouble = !trouble_.empty();
  write_facts(table, plan_.group.rank(), facts_);
}

}  // namespace lockstep
